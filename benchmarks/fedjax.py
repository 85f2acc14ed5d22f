"""Run FedJAX as a contestant: federated averaging with its `for_each_client`, on the CPU, without evaluation.

The benchmark uses FedJAX's fastest settings.

The jit backend trains the clients one after another, and XLA uses both cores. The pmap backend on two CPU devices was
slower (W3: 0.36 s instead of 0.19 s per round, W1: 1.4 s instead of 1.3 s). The pmap backend also fails with newer
versions of JAX. JAX is pinned to 0.5.3, the last version that FedJAX 0.0.17 supports. Since JAX 0.6, XLA runs
convolutions on one core (W1 with 100 samples per client: 2.2 s per round with JAX 0.10, 1.3 s with JAX 0.5.3). The MLP
uses XLA's older CPU runtime, because its launch overhead is smaller (W3: 0.09 s instead of 0.19 s per round). The CNN
uses the newer runtime, because the older runtime is slower for the CNN. A maximum over a reshaped array replaces
Haiku's max pool, because the gradient of the maximum is faster (46 ms instead of 77 ms per step of the CNN).

Usage:
    python -m benchmarks.fedjax W3
"""

from __future__ import annotations

import os
import sys

import fedjax
import haiku as hk
import jax
import numpy as np
import optax

from benchmarks.gate import Gate
from benchmarks.workloads import Workload, chosen, normalised


def mlp(x: jax.Array) -> jax.Array:
    """Build the same network as `networks.mlp`."""
    return hk.nets.MLP([64, 1])(hk.Flatten()(x))


def mcmahan_cnn(x_bhwc: jax.Array, classes: int) -> jax.Array:
    """Build the same network as `networks.mcmahan_cnn`."""
    for channels in (32, 64):
        x_bhwc = max_pool(jax.nn.relu(hk.Conv2D(channels, 5)(x_bhwc)))
    return hk.nets.MLP([512, classes])(hk.Flatten()(x_bhwc))


def max_pool(x_bhwc: jax.Array) -> jax.Array:
    b, h, w, c = x_bhwc.shape
    return x_bhwc.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


def model_of(name: str, w: Workload) -> fedjax.Model:
    c, height, width = w.shape
    sample = {"x": np.zeros((1, height, width, c), np.float32), "y": np.zeros(1, np.int32)}
    if name == "W3":
        net = hk.transform(lambda batch: mlp(batch["x"]))
        return fedjax.create_model_from_haiku(
            net, sample, lambda batch, logits: optax.sigmoid_binary_cross_entropy(logits[:, 0], batch["y"])
        )
    net = hk.transform(lambda batch: mcmahan_cnn(batch["x"], w.classes))
    return fedjax.create_model_from_haiku(
        net, sample, lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)
    )


def clients_of(w: Workload) -> fedjax.FederatedData:
    x, y = w.data()
    # XLA's convolutions on the CPU require the channels as the last axis.
    images, labels = np.ascontiguousarray(np.moveaxis(normalised(x), 2, -1)), y.astype(np.int32)
    return fedjax.InMemoryFederatedData({c: {"x": images[c], "y": labels[c]} for c in range(w.clients)})


def main(argv: list[str]) -> None:
    gate = Gate()
    name, w, _ = chosen(argv)
    if name not in ("W1", "W3"):
        raise SystemExit(f"fedjax supports only W1 and W3, got {name}")
    if name == "W3":
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_thunk_runtime=false"
    # FedJAX calls `jax.tree_map`, which JAX removed in 0.6.
    jax.tree_map = jax.tree_util.tree_map
    fedjax.set_for_each_client_backend("jit")
    model = model_of(name, w)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(w.lr, w.momentum or None),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(w.batch, w.epochs),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(clients_of(w), w.per_round, seed=0)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    while True:
        gate.round_begins()
        state, _ = algorithm.apply(state, sampler.sample())
        # JAX computes asynchronously, so wait until the weights of the round are available.
        jax.block_until_ready(state.params)


if __name__ == "__main__":
    main(sys.argv[1:])

"""FedJAX as a contestant: its federated averaging over its `for_each_client`, on the CPU, without evaluation.

python -m benchmarks.fedjax W3

It is set up to be as fast as possible:

* The jit backend trains one client after the other and leaves both cores to XLA. The pmap backend with a client on each
  of two CPU devices was slower (W3: 0.36 s a round against 0.19 s, W1: 1.4 s against 1.3 s), and fails with newer JAX.
* JAX is pinned to 0.5.3, the last version that the published FedJAX 0.0.17 runs on. From 0.6 on, XLA runs convolutions
  on one core (W1 with 100 samples a client: 1.3 s a round with 0.5.3, 2.2 s with 0.10).
* The MLP's steps are so short that the time to start them matters most. XLA's older CPU runtime starts them faster
  (W3: 0.09 s against 0.19 s); for the CNN it is slower.
* A max pool over a reshaped array has a faster gradient than Haiku's (the CNN's step: 46 ms against 77 ms).
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
    """The same network as `networks.mlp`."""
    return hk.nets.MLP([64, 1])(hk.Flatten()(x))


def mcmahan_cnn(x_bhwc: jax.Array, classes: int) -> jax.Array:
    """The same network as `networks.mcmahan_cnn`."""
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
    # XLA's convolutions on the CPU need channels last.
    images, labels = np.ascontiguousarray(np.moveaxis(normalised(x), 2, -1)), y.astype(np.int32)
    return fedjax.InMemoryFederatedData({c: {"x": images[c], "y": labels[c]} for c in range(w.clients)})


def main(argv: list[str]) -> None:
    gate = Gate()
    name, w, _ = chosen(argv)
    if name not in ("W1", "W3"):
        raise SystemExit(f"fedjax: W1 and W3 only, not {name}")
    if name == "W3":
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_thunk_runtime=false"
    # FedJAX calls `jax.tree_map`, which JAX no longer has from 0.6 on.
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
        # JAX returns before it has computed, so wait for the round's weights.
        jax.block_until_ready(state.params)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Run pfl-research as a contestant: federated averaging with its simulated backend, without evaluation.

The benchmark uses the fastest settings. Two worker processes with one torch thread each are connected by the
environment variables PFL_WORKER_*. Each process trains half of a round's clients, and torch.distributed adds their
updates. A single process was slower with one and with two torch threads (W3: 0.34 s instead of 0.18 s per round). The
fused kernel of SGD was not faster. The data are in memory as tensors, and pfl does not print metrics.

Usage:
    python -m benchmarks.pfl W3
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gate import Gate
from benchmarks.naive import plan_of
from benchmarks.workloads import Workload, chosen, normalised

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


# ------------------------------------------------------------------------------------------ two processes
def lead(argv: list[str]) -> Callable[[], None]:
    """Start the second process.

    Return a function that synchronizes both processes before a round. Without this function, the second process would
    work while the first process waits for the gate.
    """
    gate = Gate()
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    # pfl uses the number of addresses as the number of workers, but all workers connect to the first address.
    os.environ |= {RANK: "0", ADDRESSES: f"{address},{address}"}
    command = [sys.executable, "-m", "benchmarks.pfl", *argv]
    other = subprocess.Popen(command, env={**os.environ, RANK: "1"}, stdin=subprocess.PIPE, text=True)

    def round_begins() -> None:
        gate.round_begins()
        print(file=other.stdin, flush=True)

    return round_begins


def follow() -> None:
    """Wait in the second process for the next round. End the second process if the first process has ended."""
    if not sys.stdin.readline():
        os._exit(0)


# -------------------------------------------------------------------------------------------- the training
class Net(nn.Module):
    def __init__(self, net: nn.Module, binary: bool) -> None:
        super().__init__()
        self.net = net
        self.binary = binary

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        if self.binary:
            return F.binary_cross_entropy_with_logits(logits.squeeze(1), y.float())
        return F.cross_entropy(logits, y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {"loss": self.loss(x, y).item()}


def federate(name: str, w: Workload, round_begins: Callable[[], None]) -> None:
    # Importing pfl blocks until the other worker process is running.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Gated(TrainingProcessCallback[PyTorchModel]):
        """Waits for the gate before each round except the first round, which is always an evaluation in pfl."""

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            round_begins()
            return False, Metrics()

    x, y = w.data()
    images, labels = torch.from_numpy(normalised(x)), torch.from_numpy(y)

    def client(number: int) -> Dataset:
        # Shuffle here, because pfl does not shuffle the samples.
        order = torch.randperm(w.samples)
        return Dataset((images[number][order], labels[number][order]), user_id=str(number))

    users = FederatedDataset(client, get_user_sampler("minimize_reuse", range(w.clients)))
    net = Net(plan_of(name, w).nets[-1], binary=name == "W3")
    sgd = partial(torch.optim.SGD, momentum=w.momentum)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=w.per_round,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users, [WeightByDatapoints()]),
        PyTorchModel(net, sgd, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=w.epochs, local_learning_rate=w.lr, local_batch_size=w.batch),
        callbacks=[Gated()],
        send_metrics_to_platform=False,
    )


def main(argv: list[str]) -> None:
    round_begins = follow if RANK in os.environ else lead(argv)
    name, w, _ = chosen(argv)
    # pfl requires the same seeds in both processes.
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    federate(name, w, round_begins)


if __name__ == "__main__":
    main(sys.argv[1:])

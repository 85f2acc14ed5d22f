"""The workloads, the same for every contestant. This module needs only numpy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

MEAN, STD = 0.5, 0.25
PRECISIONS = ("fp32", "auto", "bf16", "amp", "fp16")


@dataclass(frozen=True)
class Workload:
    title: str
    clients: int
    per_round: int
    samples: int
    """Samples of each client."""
    shape: tuple[int, ...]
    """Of a sample."""
    classes: int
    """0: the target is a number."""
    batch: int
    lr: float
    momentum: float
    epochs: int = 1
    algorithm: str = "fedavg"
    peers: tuple[str, ...] = ("naive",)

    def data(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Made-up samples: uint8 (clients, samples, *shape) and int64 labels, or float32
        targets, (clients, samples)."""
        rng = np.random.default_rng(seed)
        x = rng.integers(0, 256, (self.clients, self.samples, *self.shape), dtype=np.uint8)
        if not self.classes:
            return x, rng.standard_normal((self.clients, self.samples), dtype=np.float32)
        return x, rng.integers(0, self.classes, (self.clients, self.samples), dtype=np.int64)


def normalised(x: np.ndarray) -> np.ndarray:
    """Images from uint8 to normalised float32, as every contestant feeds them to the network."""
    out: np.ndarray = (x.astype(np.float32) / 255 - MEAN) / STD
    return out


def _cifar_like(title: str, **changes: object) -> Workload:
    base = {"clients": 100, "per_round": 10, "samples": 500, "shape": (3, 32, 32), "classes": 10, "batch": 50}
    return Workload(title, **{**base, "lr": 0.01, "momentum": 0.5, **changes})  # type: ignore[arg-type]


def _aiot(title: str, shape: tuple[int, ...], classes: int) -> Workload:
    return Workload(title, 80, 8, 200, shape, classes, batch=32, lr=0.01, momentum=0.0, peers=("naive", "flower"))


WORKLOADS = {
    "W1": _cifar_like("FedAvg, McMahan CNN", peers=("naive", "flower", "pfl", "fedjax")),
    "W2": _cifar_like("FedAvg, ResNet18", peers=("naive", "flower", "pfl")),
    "W3": Workload(
        "FedAvg, MLP 18-64-1",
        clients=1000,
        per_round=100,
        samples=40,
        shape=(18, 1, 1),
        classes=2,
        batch=10,
        lr=0.1,
        momentum=0.0,
        peers=("naive", "flower", "pfl", "fedjax"),
    ),
    "W4": _cifar_like("FlexFL, VGG16 of half width, lambda 10", algorithm="flexfl"),
    "W4-no-kd": _cifar_like("FlexFL, VGG16 of half width, lambda 0", algorithm="flexfl-no-kd"),
    "W5": _cifar_like("AdaptiveFL, ResNet18, pool of seven", algorithm="adaptivefl"),
    # FedAIoT's clients, 16,569 and 15,788 samples over 80, in batches of 32.
    "W6": _aiot("FedAvg, LSTM of WISDM", shape=(200, 6), classes=12),
    "W7": _aiot("FedAvg, MLP of AEP", shape=(18,), classes=0),
}


def count(text: str) -> int:
    """A number on the command line, 1 or more."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is expected, got {text!r}")
    return int(text)


def chosen(argv: list[str]) -> tuple[str, Workload, argparse.Namespace]:
    """Parses a contestant's command line: the workload's name, the workload (with `--samples`, if given), and all
    options."""
    p = argparse.ArgumentParser()
    p.add_argument("workload", choices=WORKLOADS)
    p.add_argument("--samples", type=count, help="samples of each client, instead of the workload's number")
    p.add_argument("--precision", default="fp32", choices=PRECISIONS)
    p.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    args = p.parse_args(argv)
    w = WORKLOADS[args.workload]
    return args.workload, replace(w, samples=args.samples or w.samples), args

"""Workloads that are the same for all contestants. This module requires only NumPy."""

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
    """Number of samples of each client."""
    shape: tuple[int, ...]
    classes: int
    """Number of classes; 0 for regression."""
    batch: int
    lr: float
    momentum: float
    epochs: int = 1
    algorithm: str = "fedavg"
    peers: tuple[str, ...] = ("naive",)

    def data(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Generate random uint8 samples of shape (clients, samples, *shape) and targets of shape (clients, samples).
        Class labels are int64, and regression targets are float32.
        """
        rng = np.random.default_rng(seed)
        x = rng.integers(0, 256, (self.clients, self.samples, *self.shape), dtype=np.uint8)
        if not self.classes:
            return x, rng.standard_normal((self.clients, self.samples), dtype=np.float32)
        return x, rng.integers(0, self.classes, (self.clients, self.samples), dtype=np.int64)


def normalised(x: np.ndarray) -> np.ndarray:
    """Convert uint8 images to the normalised float32 input of all networks."""
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
    # As in FedAIoT, 80 clients share 16,569 samples (W6) or 15,788 samples (W7), and the batch size is 32.
    "W6": _aiot("FedAvg, LSTM of WISDM", shape=(200, 6), classes=12),
    "W7": _aiot("FedAvg, MLP of AEP", shape=(18,), classes=0),
}


def count(text: str) -> int:
    """Parse a whole number of at least 1 from the command line."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def chosen(argv: list[str]) -> tuple[str, Workload, argparse.Namespace]:
    """Parse the command line of a contestant. Return the workload's name, the workload, and all options."""
    p = argparse.ArgumentParser()
    p.add_argument("workload", choices=WORKLOADS)
    p.add_argument("--samples", type=count, help="samples of each client (default: the workload's)")
    p.add_argument("--precision", default="fp32", choices=PRECISIONS)
    p.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    args = p.parse_args(argv)
    w = WORKLOADS[args.workload]
    return args.workload, replace(w, samples=args.samples or w.samples), args

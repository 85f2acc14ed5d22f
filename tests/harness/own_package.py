"""A package of somebody's own, for tests of `run.code`."""

from __future__ import annotations

from pathlib import Path

NAME = "theirs23"

FILES = {
    "__init__.py": "",
    "mine.py": '''
from dataclasses import dataclass, replace

from fl_engine.algorithms import FedAvg

from theirs23.rates import factor


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg with another learning rate."""

    def task(self, order, ctx):
        task = super().task(order, ctx)
        return replace(task, optimizer=replace(task.optimizer, lr=factor() * task.optimizer.lr))
''',
    "rates.py": """
from importlib.resources import files


def factor():
    return float(files("theirs23").joinpath("factor.txt").read_text("utf-8"))
""",
    "loss.py": """
import torch.nn.functional as F


def smooth(model, x, y, start):
    return F.cross_entropy(model(x), y, label_smoothing=0.1)
""",
    "factor.txt": "0.5\n",
}

SETS = ("algorithm.name=theirs23.mine:Mine", "algorithm.eligible=all")


def write(folder: Path) -> Path:
    """The package, in this folder."""
    package = folder / NAME
    package.mkdir(parents=True)
    for name, text in FILES.items():
        (package / name).write_text(text, encoding="utf-8")
    return package

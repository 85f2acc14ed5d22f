"""What a task is worth on so many samples: steps and multiply-adds, known before anything trains."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol, runtime_checkable

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import count_macs
from fl_engine.core.types import FULL, LocalTask, SubmodelSpec

FORWARDS_PER_STEP = 3
"""A training step costs so many times the forward pass: a backward pass costs about two."""


@runtime_checkable
class Epochs(Protocol):
    """Local training, as a task or a configuration describes it."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def drop_last(self) -> bool: ...


def batches(task: Epochs, samples: int) -> tuple[int, ...]:
    """Sizes of the batches of one epoch, which is as many draws as there are samples (`core.samplers`)."""
    batch = min(task.batch_size, samples)
    rest = 0 if task.drop_last else samples % batch
    return (batch,) * (samples // batch) + ((rest,) if rest else ())


def steps(task: Epochs, samples: int) -> int:
    return task.epochs * len(batches(task, samples))


def draws(task: Epochs, samples: int) -> int:
    """How many samples all steps together train on, each counted as often as it is seen."""
    return task.epochs * sum(batches(task, samples)) if samples else 0


def macs(family: ModelFamily, task: LocalTask, samples: int) -> float:
    """Multiply-adds of the whole training. A sample counts once for each time it is seen."""
    return draws(task, samples) * macs_per_sample(family, task)


def macs_per_sample(family: ModelFamily, task: LocalTask) -> float:
    """Multiply-adds of one sample's training step: that of forward and backward pass, and a forward pass for each
    teacher."""
    trained = [macs_of(family, spec) for spec in task.widths or (task.spec,)]
    teachers = task.distillation.teachers if task.distillation else ()
    step = sum(trained) / len(trained)
    if task.sandwich is not None and len(trained) > 1:
        between = trained[1:-1]
        drawn = min(task.sandwich.random, len(between))
        step = trained[0] + trained[-1] + drawn * sum(between) / max(1, len(between))
    return FORWARDS_PER_STEP * step + sum(macs_of(family, spec) for spec in teachers)


@lru_cache(maxsize=1024)
def macs_of(family: ModelFamily, spec: SubmodelSpec = FULL) -> int:
    """`count_macs`, remembered by widths: which channels are kept does not matter. Raises ModelError for what the
    network does not have."""
    layout = family.layout()
    layout.check(spec)
    return _macs(family, tuple((g, layout.width(spec, g)) for g in layout.groups), spec.blocks)


@lru_cache(maxsize=1024)
def _macs(family: ModelFamily, widths: tuple[tuple[str, int], ...], blocks: tuple[str, ...] | None) -> int:
    return count_macs(family, SubmodelSpec.of(dict(widths), blocks))

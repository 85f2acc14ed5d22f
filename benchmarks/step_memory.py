"""Measure the peak memory of the tensors of one training step.

The memory includes weights, gradients, the optimizer's state, the batch, and the activations for the backward pass. On
a GPU, PyTorch's CUDA allocator reports this memory. On a CPU, the storage of a tensor counts from the operator that
creates it until the storage is freed, and temporary memory inside a kernel is not counted. The memory of the
interpreter and the libraries is never included. `memory.level_peaks` measures the resident memory of a process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params, made_up
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, Adam, LocalTask
from fl_engine.training import local
from fl_engine.training.numerics import SINGLE, Numerics


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that are created in this context. `now` is the current number of bytes, and
    `peak` is the maximum number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type != "meta":
                address = _address(each)
                if address not in given and address not in self._known:  # not counted yet
                    self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, address, size).atexit = False

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def counted(device: str) -> Iterator[Mapping[str, int]]:
    """Measure the tensor memory of the code in the context. When the context ends, the yielded mapping contains the
    peak in bytes (`peak`)."""
    found: dict[str, int] = {}
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found["peak"] = torch.cuda.max_memory_allocated(device) - before
        return
    with LiveBytes() as live:
        yield found
    found["peak"] = live.peak


def step_memory(
    family: ModelFamily,
    goal: Task,
    batch_size: int,
    numerics: Numerics = SINGLE,
    device: str = "cpu",
    optimizer: SGD | Adam | None = None,
) -> int:
    """Return the peak bytes of one training step of the full network on made-up samples.

    The step runs the engine's client code, by default with SGD without momentum. The bytes do not include the samples
    and the initial weights.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = made_up(family, batch_size, generator).to(device), goal.examples(batch_size, generator).to(device)
    task = LocalTask(FULL, optimizer or SGD(0.01), epochs=1, batch_size=batch_size, drop_last=True, seed=0)
    start = initial_params(family, 0)
    with (
        counted(device) as found,
        local.Session(family, goal, [local.TrainingJob(task, start, x, y)], numerics) as session,
    ):
        session.epoch()
    return found["peak"]

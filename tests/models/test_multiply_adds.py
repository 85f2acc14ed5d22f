"""What `count_macs` counts, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fl_engine.core.costs import count_macs
from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, Axis, ParamLayout, Prunable, Slot, SubmodelSpec


@dataclass(frozen=True)
class Of:
    """A network without sub-models."""

    input_shape: tuple[int, ...]
    make: Callable[[], nn.Module]
    outputs: int = 1

    def layout(self) -> ParamLayout:
        state = self.make().state_dict()
        return ParamLayout({}, {name: Slot("all", (Axis(None),) * t.dim()) for name, t in state.items()})

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        return self.make()

    def prunable(self) -> tuple[Prunable, ...]:
        return ()


@pytest.mark.parametrize(
    ("make", "shape", "macs"),
    [
        (lambda: nn.LSTM(6, 6, batch_first=True), (200, 6), 57_600),
        (lambda: nn.Conv1d(4, 5, 3, 2), (4, 11), 5 * 5 * 4 * 3),
        (lambda: nn.ConvTranspose2d(4, 3, 7, bias=False), (4, 5, 6), 5 * 6 * 4 * 3 * 49),
        (lambda: nn.GroupNorm(2, 4), (4, 5, 6), 4 * 4 * 5 * 6),
        (lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), (4, 5, 6), 4 * 4 * 5 * 6),
        (lambda: nn.LayerNorm(6), (5, 6), 4 * 5 * 6),
        (lambda: nn.GRU(3, 2, batch_first=True), (7, 3), 7 * 3 * 2 * (3 + 2)),
        (lambda: nn.GRUCell(3, 2), (3,), 3 * 2 * (3 + 2)),
        (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 9), 7 * 6 * 2 * 3),
        (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 9), 9 * 4 * 3 * 3),
        (lambda: nn.Sequential(nn.PReLU(), nn.Linear(4, 3)), (4,), 12),
    ],
)
def test_multiply_adds_of_a_layer(make: Callable[[], nn.Module], shape: tuple[int, ...], macs: int) -> None:
    assert count_macs(Of(shape, make)) == macs


class Twice(nn.Module):
    """One layer, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def test_layer_that_runs_twice_counts_twice() -> None:
    assert count_macs(Of((4,), Twice)) == 32


def test_a_network_that_fails_on_one_sample_says_so() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(ModelError):
        count_macs(Of((4,), lambda: nn.Sequential(nn.Linear(4, 4), norm)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def test_unknown_layer_is_refused() -> None:
    with pytest.raises(ModelError):
        count_macs(Of((4,), lambda: nn.Sequential(nn.ModuleDict({"odd": Scale()}))))
    with pytest.raises(ModelError):
        count_macs(Of((4,), lambda: nn.Sequential(nn.MultiheadAttention(4, 2))))

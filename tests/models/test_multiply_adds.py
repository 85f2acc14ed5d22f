"""What `count_macs` counts, against the same layer written with linear layers, whose products are plain to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.costs import count_macs
from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, Axis, ParamLayout, Prunable, Slot, SubmodelSpec


@dataclass(frozen=True)
class Of:
    """A network that is never cut."""

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


@dataclass(frozen=True)
class OfTokens(Of):
    vocabulary: int = 9


class LinearLSTM(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(features, 4 * hidden), nn.Linear(hidden, 4 * hidden)
        self.hidden = hidden

    def forward(self, x_btf: Tensor) -> Tensor:
        h = c = x_btf.new_zeros(len(x_btf), self.hidden)
        for x in x_btf.unbind(1):
            i, f, g, o = (self.given(x) + self.kept(h)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class LinearConv1d(nn.Module):
    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride, self.linear = kernel, stride, nn.Linear(4 * kernel, 5)

    def forward(self, x_bcl: Tensor) -> Tensor:
        windows = x_bcl.unfold(2, self.kernel, self.stride)  # (B, C, L, kernel)
        out: Tensor = self.linear(windows.transpose(1, 2).flatten(2))
        return out.transpose(1, 2)


class LinearTransposed(nn.Module):
    """Each pixel becomes a patch of 7x7; patches that overlap are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3 * 49, bias=False)

    def forward(self, x_bchw: Tensor) -> Tensor:
        patches = self.linear(x_bchw.flatten(2).transpose(1, 2)).transpose(1, 2)
        h, w = x_bchw.shape[2:]
        return F.fold(patches, (h + 6, w + 6), 7)


def test_an_lstm_of_200_steps() -> None:
    torchs, ours = nn.LSTM(6, 6, batch_first=True), LinearLSTM(6, 6)
    ours.given.weight, ours.given.bias = torchs.weight_ih_l0, torchs.bias_ih_l0
    ours.kept.weight, ours.kept.bias = torchs.weight_hh_l0, torchs.bias_hh_l0
    x = torch.randn(3, 200, 6)
    torch.testing.assert_close(ours(x), torchs(x)[0][:, -1])
    counts = [count_macs(Of((200, 6), make)) for make in (lambda: torchs, lambda: ours)]
    assert counts == [57_600, 57_600]


def test_a_convolution_of_a_series() -> None:
    torchs, ours = nn.Conv1d(4, 5, 3, 2), LinearConv1d(3, 2)
    with torch.no_grad():
        ours.linear.weight.copy_(torchs.weight.flatten(1))
        ours.linear.bias.copy_(torchs.bias)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 11)
    torch.testing.assert_close(ours(x), torchs(x))
    assert count_macs(Of((4, 11), lambda: torchs)) == count_macs(Of((4, 11), lambda: ours)) == 5 * 5 * 4 * 3


def test_a_transposed_convolution() -> None:
    torchs, ours = nn.ConvTranspose2d(4, 3, 7, bias=False), LinearTransposed()
    with torch.no_grad():
        ours.linear.weight.copy_(torchs.weight.flatten(1).T)
    x = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(ours(x), torchs(x))
    counts = [count_macs(Of((4, 5, 6), make)) for make in (lambda: torchs, lambda: ours)]
    assert counts == [5 * 6 * 4 * 3 * 49] * 2


@pytest.mark.parametrize(
    ("make", "shape", "macs"),
    [
        (lambda: nn.GroupNorm(2, 4), (4, 5, 6), 4 * 4 * 5 * 6),
        (lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), (4, 5, 6), 4 * 4 * 5 * 6),
        (lambda: nn.LayerNorm(6), (5, 6), 4 * 5 * 6),
        (lambda: nn.GRU(3, 2, batch_first=True), (7, 3), 7 * 3 * 2 * (3 + 2)),
        (lambda: nn.GRUCell(3, 2), (3,), 3 * 2 * (3 + 2)),
        (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 9), 7 * 6 * 2 * 3),
        (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 9), 9 * 4 * 3 * 3),
        (lambda: nn.Sequential(nn.PReLU(), nn.Linear(4, 3)), (4,), 12),
    ],
    ids=["group_norm", "batch_norm", "layer_norm", "gru", "gru_cell", "conv_groups", "transposed_groups", "prelu"],
)
def test_other_layers(make: Callable[[], nn.Module], shape: tuple[int, ...], macs: int) -> None:
    assert count_macs(Of(shape, make)) == macs


def test_embeddings_cost_nothing() -> None:
    assert count_macs(OfTokens((7,), lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)))) == 7 * 4 * 3


class Twice(nn.Module):
    """One layer, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def test_a_layer_that_runs_twice_counts_twice() -> None:
    assert count_macs(Of((4,), Twice)) == 32


class ByKeyword(Twice):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(input=self.a(input=x))
        return out


def test_a_layer_that_is_called_by_keyword_is_counted() -> None:
    assert count_macs(Of((4,), ByKeyword)) == 32


def test_a_network_that_fails_on_one_sample_says_so() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(ModelError, match=r"Of must take a batch of one sample"):
        count_macs(Of((4,), lambda: nn.Sequential(nn.Linear(4, 4), norm)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class CountedScale(Scale):
    """With a layer inside, which `macs` stands for as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(super().forward(x))
        return out

    def macs(self, given: Tensor, output: Tensor) -> int:
        return given.numel() + 4 * output.numel()


def test_unknown_layer_is_refused_unless_it_counts_itself() -> None:
    with pytest.raises(ModelError, match=r"0\.odd, a Scale"):
        count_macs(Of((4,), lambda: nn.Sequential(nn.ModuleDict({"odd": Scale()}))))
    with pytest.raises(ModelError, match="MultiheadAttention"):
        count_macs(Of((4,), lambda: nn.Sequential(nn.MultiheadAttention(4, 2))))
    assert count_macs(Of((4,), lambda: nn.Sequential(CountedScale(), nn.Linear(4, 2)))) == 4 + 16 + 8

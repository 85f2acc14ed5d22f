"""LSTMs, sliced by hidden unit: a unit owns one row in each of the four gates of torch's weights.

A unit whose weights are all zero is zero at every step, so a slice computes the same as the whole layer with the other
units' weights set to zero. In the same way several clients' LSTMs are one LSTM whose weights between the units of two
clients are zero, so small LSTMs of one direction train side by side. Bidirectional ones train one client at a time.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.types import Axis, Slot

GATES = 4
UNITS = 24
"""Most units of several LSTMs that run as one. Beyond that, products with zeros cost more than the calls that are
saved."""


@cache
def _together(hidden: int) -> int:
    """The number of lanes that run as one LSTM on a CPU. Without AVX-512, oneDNN rounds a unit by its place among the
    others, so each lane runs alone."""
    return max(1, UNITS // hidden) if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 1


class Cells(nn.LSTM):
    """An LSTM of one layer and one direction, series first."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(features, hidden, batch_first=True)

    def in_lanes(self) -> nn.Module:
        return _Lanes()


class _Lanes(nn.Module):
    """Series (B, n*T, F) -> the units' outputs at every step, (B, n*T, hidden)."""

    weight_ih_l0: Tensor
    """(n, 4*hidden, F)."""
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor]:
        weights = [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]
        lanes, hidden = len(weights[0]), weights[1].shape[2]
        together = 1 if lanes == 1 else _together(hidden)
        x_nbtf = x.reshape(len(x), lanes, -1, x.shape[2]).transpose(0, 1)
        # Pad with lanes of zeros, so that the kernels are always the same.
        given = [F.pad(t, (0, 0) * (t.dim() - 1) + (0, -lanes % together)) for t in (x_nbtf, *weights)]
        parts = zip(*(torch.split(t, together) for t in given), strict=True)
        out_nbth = torch.cat([_side_by_side(*part) for part in parts])[:lanes]
        return (out_nbth.transpose(0, 1).flatten(1, 2),)


def _side_by_side(x_nbtf: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """(n, B, T, F) -> (n, B, T, hidden), as one LSTM of n*hidden units. Its units are ordered by gate, lane, unit."""
    n, hidden = len(w_ih), w_hh.shape[2]
    if n == 1:
        weights, x = [w_ih[0], w_hh[0], b_ih[0], b_hh[0]], x_nbtf[0]
    else:
        weights = [_diagonal(w_ih), _diagonal(w_hh), *(_by_gate(b).flatten() for b in (b_ih, b_hh))]
        x = x_nbtf.movedim(0, 2).flatten(2)
    start = x.new_zeros(1, len(x), n * hidden)
    out_bth: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, True, False, True)[0]
    return out_bth.view(*x.shape[:2], n, hidden).movedim(2, 0)


def _by_gate(rows: Tensor) -> Tensor:
    """(n, 4*hidden, ...) -> (4, n, hidden, ...)."""
    return rows.reshape(len(rows), GATES, -1, *rows.shape[2:]).transpose(0, 1)


def _diagonal(weight: Tensor) -> Tensor:
    """(n, 4*hidden, columns) -> (4*n*hidden, n*columns): each lane's weights, and zeros between two lanes."""
    of_ghcn = _by_gate(weight).permute(0, 2, 3, 1)
    return torch.diag_embed(of_ghcn).permute(0, 3, 1, 4, 2).flatten(0, 2).flatten(1)


class Steps(nn.Module):
    """Series (B, T, F) -> the units' outputs at every step, (B, T, hidden)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.cells = Cells(features, hidden)

    def forward(self, x_btf: Tensor) -> Tensor:
        out: Tensor = self.cells(x_btf)[0]
        return out


class BothEnds(nn.Module):
    """Series (B, T, F) -> each direction's output after it has read the whole series, (B, 2 * hidden): first the
    forward direction, then the backward one."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(features, hidden, batch_first=True, bidirectional=True)

    def forward(self, x_btf: Tensor) -> Tensor:
        last: Tensor = self.cells(x_btf)[1][0]
        return last.transpose(0, 1).flatten(1)


def lstm_slots(name: str, block: str, inside: Axis, group: str, *, both_ways: bool = False) -> dict[str, Slot]:
    """The slots of an `nn.LSTM` of one layer called `name`, in state order. Its units are the channels of `group`;
    with `both_ways` a channel is a unit of each direction."""
    unit, gates = Axis(group), Axis(group, copies=GATES)
    slots: dict[str, Slot] = {}
    for way in ("", "_reverse") if both_ways else ("",):
        slots[f"{name}.weight_ih_l0{way}"] = Slot(block, (gates, inside))
        slots[f"{name}.weight_hh_l0{way}"] = Slot(block, (gates, unit))
        slots[f"{name}.bias_ih_l0{way}"] = Slot(block, (gates,))
        slots[f"{name}.bias_hh_l0{way}"] = Slot(block, (gates,))
    return slots

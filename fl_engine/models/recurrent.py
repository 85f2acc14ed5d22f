"""LSTMs, sliced by hidden unit: a unit owns one row in each of the four gates of torch's weights.

A unit whose weights are all zero gives zero at every step, so a slice computes the same as the whole layer with the
other units' weights set to zero. torch's LSTM cannot run in lanes, so such networks train one client at a time.
"""

from __future__ import annotations

from torch import Tensor, nn

from fl_engine.core.types import Axis, Slot

GATES = 4


class Steps(nn.Module):
    """Series (B, T, F) -> the units' outputs at every step, (B, T, hidden)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(features, hidden, batch_first=True)

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

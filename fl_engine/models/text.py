"""What networks for text share: where they answer, and their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from torch import Tensor, nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.models.layers import LARGEST, check_sizes

Answers = Literal["every", "last"]
"""`every`: logits behind every token, (B, outputs, T), for next tokens; `last`: behind the last one alone,
(B, outputs), for classification."""


class TextFamily(ModelFamily, Protocol):
    """A network for sequences of tokens."""

    @property
    def answers(self) -> Answers: ...
    @property
    def width(self) -> float: ...


def check_text(family: TextFamily, least: Sequence[tuple[str, int]]) -> None:
    """Raises ModelError for options from which no network can be built. `least`: fields that hold integers, and the
    least of each."""
    name = type(family).__name__
    check_sizes(family, "(T,) of a sequence of tokens", 1, family.width)
    for field, smallest in least:
        value = getattr(family, field)
        if type(value) is not int or not smallest <= value <= LARGEST:
            raise ModelError(f"{name}: {field} is an integer from {smallest} to {LARGEST}, got {value!r}")
    if family.answers not in get_args(Answers):
        raise ModelError(f"{name}: answers is one of {', '.join(get_args(Answers))}, got {family.answers!r}")


def answering(answers: Answers, layers: OrderedDict[str, nn.Module], output: OrderedDict[str, nn.Module]) -> nn.Module:
    """`layers` give (B, T, channels), `output` makes logits of channels: the network that answers where it is told."""
    if answers == "last":
        return nn.Sequential(layers | OrderedDict(last=Last()) | output)
    return nn.Sequential(layers | output | OrderedDict(outputs_first=OutputsFirst()))


class Last(nn.Module):
    """(B, T, channels) -> those of the last position, (B, channels)."""

    def forward(self, x_btc: Tensor) -> Tensor:
        return x_btc[:, -1]


class OutputsFirst(nn.Module):
    """(B, T, outputs) -> (B, outputs, T)."""

    def forward(self, x_bto: Tensor) -> Tensor:
        return x_bto.transpose(1, 2)

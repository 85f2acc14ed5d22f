"""What networks for text share: where they answer, and their tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.models.network import Network

Answers = Literal["every", "last"]


@dataclass(frozen=True)
class TextNetwork(Network):
    input_shape: tuple[int]
    vocabulary: int = 0
    """Tokens are 0 .. vocabulary - 1; 0: as many as there are outputs."""
    answers: Answers = "every"
    """every: logits behind every token, (B, outputs, T), for next tokens; last: behind the last one alone,
    (B, outputs), for classification."""

    axes: ClassVar[tuple[str, ...]] = ("tokens",)
    sizes: ClassVar[tuple[str, ...]]
    """The options that are sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("vocabulary", 0)
        for option in self.sizes:
            self.check_size(option)
        if self.answers not in get_args(Answers):
            raise ModelError(f"{type(self).__name__}: answers must be every or last, got {self.answers!r}")
        object.__setattr__(self, "vocabulary", self.vocabulary or self.outputs)


def answering(answers: Answers, layers: OrderedDict[str, nn.Module], output: OrderedDict[str, nn.Module]) -> nn.Module:
    """The network of `layers`, which return (B, T, channels), and `output`, which turns channels into logits."""
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

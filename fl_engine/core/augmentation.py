"""Random changes of images and maps while a client trains. A new one is a class and a line in AUGMENTATIONS.

They act on batches as a network is fed them, after normalisation, and never in evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT, Count, Fraction
from fl_engine.core.registry import Contract
from fl_engine.core.samples import IMAGE_AXES


class Augmentation(Protocol):
    """A frozen dataclass of options."""

    def check(self, x: Tensor) -> None:
        """Raises ModelError where samples like x (N, ...) cannot be augmented so."""

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        """A batch of one client's samples, changed: same shape and type, x itself unchanged. The generator is on the
        CPU, and is good for this batch alone."""


@dataclass(frozen=True)
class Flip:
    """Mirrors a sample, left to right, with probability `share`."""

    __pydantic_config__: ClassVar = STRICT
    name: Literal["flip"] = "flip"
    share: Fraction = 0.5

    def check(self, x: Tensor) -> None:
        _check_maps(self.name, x)

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        mirrored = (torch.rand(len(x_bchw), generator=generator) < self.share).to(x_bchw.device)
        return torch.where(mirrored[:, None, None, None], x_bchw.flip(-1), x_bchw)


@dataclass(frozen=True)
class Crop:
    """Puts a border of `padding` pixels around a sample and cuts a window of its old size out, at a random place.

    The border is 0 after normalisation, so it has the mean of the data. (FedRolex's code pads before it, with black.)
    """

    __pydantic_config__: ClassVar = STRICT
    name: Literal["crop"] = "crop"
    padding: Count = 4

    def check(self, x: Tensor) -> None:
        _check_maps(self.name, x)
        side = min(x.shape[2:])
        if self.padding >= side:
            raise ModelError(
                f"training.augment: crop pads {self.padding} pixels, and a side of the samples has {side}, which might "
                f"leave nothing of one: set a padding of at most {side - 1}"
            )

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        b, c, h, w = x_bchw.shape
        corner_2b = torch.randint(2 * self.padding + 1, (2, b), generator=generator).to(x_bchw.device)
        rows = corner_2b[0, :, None] + torch.arange(h, device=x_bchw.device)
        columns = corner_2b[1, :, None] + torch.arange(w, device=x_bchw.device)
        samples, channels = torch.arange(b, device=x_bchw.device), torch.arange(c, device=x_bchw.device)
        padded = F.pad(x_bchw, (self.padding,) * 4)
        return padded[
            samples[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]


def _check_maps(name: str, x: Tensor) -> None:
    if x.dim() != IMAGE_AXES or x.dtype == torch.int64:
        kind = "tokens" if x.dtype == torch.int64 else "numbers"
        raise ModelError(
            f"training.augment: {name} takes images and maps (C, H, W), a sample is {kind} of the shape "
            f"{tuple(x.shape[1:])}: leave {name} out of training.augment"
        )


AUGMENTATIONS: dict[str, type[Augmentation]] = {"flip": Flip, "crop": Crop}

Augmenting = Annotated[Augmentation, Contract("augmentation", AUGMENTATIONS, Augmentation)]
"""For a field: chosen by name in a configuration, or one's own as `package.module:NAME`."""

"""Random changes of images and maps while a client trains. A new one is a class and a line in AUGMENTATIONS.

They act on batches as a network is fed them, after normalisation, and never in evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.errors import ModelError
from fl_engine.core.fields import STRICT, Count, Fraction
from fl_engine.core.pictures import Compress, Hsv, MixUp, Scale, Shear, check_maps
from fl_engine.core.registry import Contract


class Augmentation(Protocol):
    """A frozen dataclass of options."""

    def check(self, x: Tensor) -> None:
        """Raises ModelError where samples like x (N, ...) cannot be augmented so."""

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        """A batch of one client's samples, changed: same shape and type, x itself unchanged. The generator is on the
        CPU, and is good for this batch alone."""


@runtime_checkable
class CarriesBoxes(Protocol):
    """An augmentation that says what becomes of targets which are boxes (`core.boxes`). Where targets are boxes, it
    alone is taken, by this method; `boxes_only = True` says that it is of no use elsewhere."""

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Samples as `apply` gives them, and their targets (B, boxes, 5); y itself is unchanged."""


@dataclass(frozen=True)
class Flip:
    """Mirrors a sample, left to right with probability `share`, and top to bottom with probability `vertical`."""

    __pydantic_config__ = STRICT
    name: Literal["flip"] = "flip"
    share: Fraction = 0.5
    vertical: Annotated[float, Field(ge=0, le=1)] = 0.0

    def check(self, x: Tensor) -> None:
        check_maps(self.name, x)

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        for axis, mirrored in self._mirrored(x_bchw, generator):
            x_bchw = torch.where(mirrored[:, None, None, None], x_bchw.flip(axis), x_bchw)
        return x_bchw

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        y = y.clone()
        for axis, mirrored in self._mirrored(x_bchw, generator):
            x_bchw = torch.where(mirrored[:, None, None, None], x_bchw.flip(axis), x_bchw)
            centre = y[..., -axis]
            y[..., -axis] = torch.where(mirrored[:, None] & boxes.present(y), 1 - centre, centre)
        return x_bchw, y

    def _mirrored(self, x_bchw: Tensor, generator: torch.Generator) -> list[tuple[int, Tensor]]:
        """An axis, the last or the one before, and which samples are mirrored along it."""
        shares = [(-1, self.share)] + ([(-2, self.vertical)] if self.vertical else [])
        return [(axis, (torch.rand(len(x_bchw), generator=generator) < p).to(x_bchw.device)) for axis, p in shares]


@dataclass(frozen=True)
class Crop:
    """Puts a border of `padding` pixels around a sample and cuts a window of its old size out, at a random place.

    The border is 0 after normalisation, so it has the mean of the data. (FedRolex's code pads before it, with black.)
    """

    __pydantic_config__ = STRICT
    name: Literal["crop"] = "crop"
    padding: Count = 4

    def check(self, x: Tensor) -> None:
        check_maps(self.name, x)
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


AUGMENTATIONS: dict[str, type[Augmentation]] = {
    "flip": Flip,
    "crop": Crop,
    "hsv": Hsv,
    "compress": Compress,
    "shear": Shear,
    "scale": Scale,
    "mixup": MixUp,
}

Augmenting = Annotated[Augmentation, Contract("augmentation", AUGMENTATIONS, Augmentation)]
"""For a field: chosen by name in a configuration, or one's own as `package.module:NAME`."""

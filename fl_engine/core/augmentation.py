"""Augment images and maps randomly during training, after normalisation. To add an augmentation, write a class and list
it in AUGMENTATIONS.

FedAIoT applies all augmentations in this module except Crop to VisDrone (Alam, Federated Learning Benchmarks and
Frameworks for Artificial Intelligence of Things, Michigan State University 2023, section 2.2.3). The thesis does not
state the augmentations' strengths. The defaults for colour, scale and MixUp are from YOLOv8, which FedAIoT trains.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.errors import ModelError
from fl_engine.core.fields import Count, Fraction, Options, Share
from fl_engine.core.registry import Contract
from fl_engine.core.samples import IMAGE_AXES

Change = Annotated[float, Field(ge=0, lt=1)]


class Augmentation(Protocol):
    """Protocol of an augmentation, a frozen dataclass of options. A class with `moves_boxes = True` also transforms
    targets that are boxes (`core.boxes`). A class with `needs_boxes = True` accepts only boxes as targets."""

    def check(self, x: Tensor) -> None:
        """Raise ModelError if the samples x (N, ...) cannot be augmented."""

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Augment a batch. Return the samples, with the shape and dtype of `x_bchw`, and the targets (B, ...). Only
        targets that are boxes may change. The generator is on the CPU, and is used only for this batch."""


class OfMaps(Options):
    """Base class of augmentations for images and maps. By default, `moves_boxes` is True."""

    moves_boxes: ClassVar[bool] = True
    name: str

    def check(self, x: Tensor) -> None:
        if x.dim() != IMAGE_AXES or x.dtype == torch.int64:
            kind = "tokens" if x.dtype == torch.int64 else "numbers"
            raise ModelError.at(
                f"training.augment: {self.name} requires images or maps (C, H, W), got {kind} {tuple(x.shape[1:])}"
            )


class OfColours(OfMaps):
    """Base class of augmentations for colour images with values from 0 to 1."""

    def check(self, x: Tensor) -> None:
        super().check(x)
        low, high = float(x.min()), float(x.max())
        if x.shape[1] != 3 or low < 0 or high > 1:
            raise ModelError.at(
                f"training.augment: {self.name} requires 3 channels with values from 0 to 1, got {x.shape[1]} channels "
                f"from {low:.3g} to {high:.3g}. Remove {self.name}, or set the data's mean to 0 and std to 1"
            )


@dataclass(frozen=True)
class Flip(OfMaps):
    """Mirrors a sample, left to right with probability `share`, and top to bottom with probability `vertical`."""

    name: Literal["flip"] = "flip"
    share: Fraction = 0.5
    vertical: Share = 0.0

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for axis, share in ((-1, self.share), (-2, self.vertical)):
            if not share:
                continue
            mirrored = (torch.rand(len(x_bchw), generator=generator) < share).to(x_bchw.device)
            x_bchw = torch.where(mirrored[:, None, None, None], x_bchw.flip(axis), x_bchw)
            if boxes.are_boxes(y):
                y, centre = y.clone(), y[..., -axis]
                y[..., -axis] = torch.where(mirrored[:, None] & boxes.present(y), 1 - centre, centre)
        return x_bchw, y


@dataclass(frozen=True)
class Crop(OfMaps):
    """Pads a sample with `padding` pixels and crops a random window of the original size.

    The padded pixels are 0 after normalisation, i.e. the mean of the data. FedRolex's code pads with black instead.
    """

    moves_boxes: ClassVar[bool] = False
    name: Literal["crop"] = "crop"
    padding: Count = 4

    def check(self, x: Tensor) -> None:
        super().check(x)
        side = min(x.shape[2:])
        if self.padding >= side:
            raise ModelError(f"training.augment: crop.padding must be less than the side {side}, got {self.padding}")

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        b, c, h, w = x_bchw.shape
        corner_2b = torch.randint(2 * self.padding + 1, (2, b), generator=generator).to(x_bchw.device)
        rows = corner_2b[0, :, None] + torch.arange(h, device=x_bchw.device)
        columns = corner_2b[1, :, None] + torch.arange(w, device=x_bchw.device)
        samples, channels = torch.arange(b, device=x_bchw.device), torch.arange(c, device=x_bchw.device)
        padded = F.pad(x_bchw, (self.padding,) * 4)
        places = samples[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None]
        return padded[places], y


@dataclass(frozen=True)
class Hsv(OfColours):
    """Randomly changes the hue, saturation and value (brightness) of each sample in HSV space (Smith, Color Gamut
    Transform Pairs, SIGGRAPH 1978)."""

    name: Literal["hsv"] = "hsv"
    hue: Change = 0.015
    """Maximum shift of the hue, as a fraction of the colour circle."""
    saturation: Change = 0.7
    """The saturation is multiplied by a random factor from 1 - saturation to 1 + saturation."""
    value: Change = 0.4
    """The brightness is multiplied by a random factor from 1 - value to 1 + value."""

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn_3b = 2 * torch.rand(3, len(x_bchw), generator=generator).to(x_bchw) - 1
        turn, more_colour, more_light = (
            drawn.view(-1, 1, 1) * most
            for drawn, most in zip(drawn_3b, (self.hue, self.saturation, self.value), strict=True)
        )
        value, least = x_bchw.amax(1), x_bchw.amin(1)
        chroma = value - least
        red, green, blue = x_bchw.unbind(1)
        safe = torch.where(chroma > 0, chroma, 1.0)
        # One unit of hue is a sixth of the colour circle.
        hue = torch.where(value == blue, (red - green) / safe + 4, 0.0)
        hue = torch.where(value == green, (blue - red) / safe + 2, hue)
        hue = torch.where(value == red, (green - blue) / safe, hue)
        hue = hue + 6 * turn
        share = (chroma / torch.where(value > 0, value, 1.0) * (1 + more_colour)).clamp(0, 1)
        value = (value * (1 + more_light)).clamp(0, 1)
        parts = []
        for offset in (5, 3, 1):
            at = (hue + offset) % 6
            parts.append(value * (1 - share * torch.minimum(at, 4 - at).clamp(0, 1)))
        return torch.stack(parts, dim=1), y


@dataclass(frozen=True)
class Compress(OfColours):
    """Compresses a sample as JPEG with probability `share`. The quality is random, from `quality` to 95."""

    name: Literal["compress"] = "compress"
    share: Fraction = 0.5
    quality: Annotated[int, Field(ge=1, le=95)] = 75

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        from PIL import Image

        chosen = torch.rand(len(x_bchw), generator=generator) < self.share
        quality = torch.randint(self.quality, 96, (len(x_bchw),), generator=generator)
        out = x_bchw.clone()
        for i in chosen.nonzero().flatten().tolist():
            pixels = (x_bchw[i].cpu() * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=int(quality[i]))
            out[i] = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1).to(out) / 255
        return out, y


@dataclass(frozen=True)
class Shear(OfMaps):
    """Shears a sample along both axes about its centre, by random angles of up to `degrees`. New pixels at the edges
    are 0 after normalisation."""

    name: Literal["shear"] = "shear"
    degrees: Annotated[float, Field(gt=0, lt=45)] = 10.0

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count, _, height, width = x_bchw.shape
        angles = math.radians(self.degrees) * (2 * torch.rand(2, count, generator=generator) - 1)
        across, down = angles.tan()
        across, down = across * (height / width), down * (width / height)  # convert to fractions of the image size
        one = torch.ones(count)
        return transformed(x_bchw, y, torch.stack([one, across, down, one], dim=1).view(-1, 2, 2))


@dataclass(frozen=True)
class Scale(OfMaps):
    """Scales a sample about its centre by a random factor from 1 - `change` to 1 + `change`. New pixels at the edges
    are 0 after normalisation."""

    name: Literal["scale"] = "scale"
    change: Change = 0.5

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        factor = 1 + self.change * (2 * torch.rand(len(x_bchw), generator=generator) - 1)
        return transformed(x_bchw, y, factor.view(-1, 1, 1) * torch.eye(2))


@dataclass(frozen=True)
class MixUp(OfMaps):
    """Blends a sample x with another sample x' of the batch, with probability `share`.

    The result is m x + (1 - m) x' with the boxes of x and x'. The weight m is drawn from Beta(alpha, alpha) (Zhang et
    al., mixup, ICLR 2018). As in YOLOv8, the boxes are not weighted by m. A sample is not blended if the batch has no
    other sample, or if the targets have too few rows for the boxes of both samples.
    """

    needs_boxes: ClassVar[bool] = True
    name: Literal["mixup"] = "mixup"
    share: Fraction = 0.5
    alpha: Count = 32

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        b, most = y.shape[:2]
        chosen = (torch.rand(b, generator=generator) < self.share).to(y.device)
        # The median of 2 alpha - 1 uniform numbers has the distribution Beta(alpha, alpha).
        weight = torch.rand(b, 2 * self.alpha - 1, generator=generator).median(dim=1).values.to(x_bchw)
        if b == 1:
            return x_bchw, y
        other = (torch.arange(b) + torch.randint(1, b, (b,), generator=generator)).to(y.device) % b
        both = torch.cat([y, y[other]], dim=1)
        held = boxes.present(both)
        chosen &= held.sum(1) <= most
        weight = weight.view(-1, 1, 1, 1)
        mixed = weight * x_bchw + (1 - weight) * x_bchw[other]
        first = (~held).long().sort(dim=1, stable=True).indices[:, :most]  # move empty rows to the end
        joined = both.gather(1, first[..., None].expand(-1, -1, y.shape[2]))
        return torch.where(chosen[:, None, None, None], mixed, x_bchw), torch.where(chosen[:, None, None], joined, y)


def transformed(x_bchw: Tensor, y: Tensor, linear_b22: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a linear map to each sample and its boxes. The origin is the centre of the image. Samples are interpolated
    bilinearly and padded with zeros."""
    centre = torch.full((2, 1), 0.5)
    matrices = torch.cat([linear_b22, centre - linear_b22 @ centre], dim=2)  # a matrix [A t] maps p to A p + t
    if boxes.are_boxes(y):
        y = boxes.moved(y, matrices)
    matrices = matrices.to(x_bchw)
    (a, b), (c, d) = matrices[:, 0, :2].T, matrices[:, 1, :2].T
    back = torch.stack([d, -b, -c, a], dim=1).view(-1, 2, 2) / (a * d - b * c).view(-1, 1, 1)
    # affine_grid expects the map from output to input pixels, in coordinates from -1 to 1.
    from_where = torch.cat([back, back @ (1 - 2 * matrices[:, :, 2:]) - 1], dim=2)
    grid = F.affine_grid(from_where, list(x_bchw.shape), align_corners=False)
    return F.grid_sample(x_bchw, grid, mode="bilinear", padding_mode="zeros", align_corners=False), y


AUGMENTATIONS: dict[str, type[Augmentation]] = {
    "flip": Flip, "crop": Crop, "hsv": Hsv, "compress": Compress, "shear": Shear, "scale": Scale, "mixup": MixUp
}  # fmt: skip

Augmenting = Annotated[Augmentation, Contract("augmentation", AUGMENTATIONS, Augmentation)]

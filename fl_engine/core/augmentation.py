"""Random changes of images and maps while a client trains, after normalisation, never in evaluation. A new one is a
class and a line in AUGMENTATIONS.

Hsv, Compress, Shear, Scale, MixUp and Flip are FedAIoT's augmentations for VisDrone (Alam, Federated Learning
Benchmarks and Frameworks for Artificial Intelligence of Things, Michigan State University 2023, section 2.2.3). The
text gives no strengths, so the defaults of colours, sizes and MixUp are those of YOLOv8, FedAIoT's network.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.errors import EnvironmentFailure, ModelError
from fl_engine.core.fields import STRICT, Count, Fraction
from fl_engine.core.registry import Contract
from fl_engine.core.samples import IMAGE_AXES

Change = Annotated[float, Field(ge=0, lt=1)]
BEST_QUALITY = 95
"""The highest quality that Pillow's documentation recommends."""


class Augmentation(Protocol):
    """A frozen dataclass of options."""

    def check(self, x: Tensor) -> None:
        """Raise ModelError if samples like x (N, ...) cannot be augmented."""

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        """Return a changed batch of one client's samples, of the same shape and type. The generator is on the CPU and
        only for this batch."""


@runtime_checkable
class CarriesBoxes(Protocol):
    """An augmentation for targets that are boxes (`core.boxes`). With such targets only these are accepted. `boxes_only
    = True` excludes other targets."""

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return samples as `apply` does, and their targets (B, boxes, 5)."""


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
        """Return an axis, the last or the one before, and which samples are mirrored along it."""
        shares = [(-1, self.share)] + ([(-2, self.vertical)] if self.vertical else [])
        return [(axis, (torch.rand(len(x_bchw), generator=generator) < p).to(x_bchw.device)) for axis, p in shares]


@dataclass(frozen=True)
class Crop:
    """Pads a sample with `padding` pixels and cuts out a random window of its old size.

    The border is 0 after normalisation, the mean of the data. (FedRolex's code pads with black.)
    """

    __pydantic_config__ = STRICT
    name: Literal["crop"] = "crop"
    padding: Count = 4

    def check(self, x: Tensor) -> None:
        check_maps(self.name, x)
        side = min(x.shape[2:])
        if self.padding >= side:
            raise ModelError(
                f"training.augment: the padding of crop must be below the samples' side, {side}, got {self.padding}"
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


@dataclass(frozen=True)
class Hsv:
    """Shifts the hue of each sample, and scales its saturation and its value (brightness) by random amounts, in the HSV
    space (Smith, Color Gamut Transform Pairs, SIGGRAPH 1978)."""

    __pydantic_config__ = STRICT
    name: Literal["hsv"] = "hsv"
    hue: Change = 0.015
    """The largest shift, in turns of the colour circle."""
    saturation: Change = 0.7
    """The factor is from 1 - this to 1 + this."""
    value: Change = 0.4
    """As saturation."""

    def check(self, x: Tensor) -> None:
        check_colours(self.name, x, (3,))

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        drawn_3b = 2 * torch.rand(3, len(x_bchw), generator=generator).to(x_bchw) - 1
        turn, more_colour, more_light = (
            drawn.view(-1, 1, 1) * most
            for drawn, most in zip(drawn_3b, (self.hue, self.saturation, self.value), strict=True)
        )
        value, least = x_bchw.amax(1), x_bchw.amin(1)
        chroma = value - least
        red, green, blue = x_bchw.unbind(1)
        safe = torch.where(chroma > 0, chroma, 1.0)
        # In sixths of a turn.
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
        return torch.stack(parts, dim=1)

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.apply(x_bchw, generator), y


@dataclass(frozen=True)
class Compress:
    """Compresses a sample as JPEG, with probability `share`, at a quality from `quality` to 95."""

    __pydantic_config__ = STRICT
    name: Literal["compress"] = "compress"
    share: Fraction = 0.5
    quality: Annotated[int, Field(ge=1, le=BEST_QUALITY)] = 75

    def check(self, x: Tensor) -> None:
        check_colours(self.name, x, (1, 3))

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        chosen = torch.rand(len(x_bchw), generator=generator) < self.share
        quality = torch.randint(self.quality, BEST_QUALITY + 1, (len(x_bchw),), generator=generator)
        out = x_bchw.clone()
        for i in chosen.nonzero().flatten().tolist():
            out[i] = _stored(x_bchw[i], int(quality[i]))
        return out

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.apply(x_bchw, generator), y


@dataclass(frozen=True)
class Shear:
    """Shears a sample along both axes about its centre, by angles of up to `degrees`. The outside is 0, after
    normalisation."""

    __pydantic_config__ = STRICT
    name: Literal["shear"] = "shear"
    degrees: Annotated[float, Field(gt=0, lt=45)] = 10.0

    def check(self, x: Tensor) -> None:
        check_maps(self.name, x)

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        return resampled(x_bchw, self._matrices(x_bchw, generator))

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        matrices = self._matrices(x_bchw, generator)
        return resampled(x_bchw, matrices), boxes.moved(y, matrices)

    def _matrices(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        count, _, height, width = x_bchw.shape
        angles = math.radians(self.degrees) * (2 * torch.rand(2, count, generator=generator) - 1)
        across, down = angles.tan()
        across, down = across * (height / width), down * (width / height)  # angles of pixels, points of shares
        one = torch.ones(count)
        return about_centre(torch.stack([one, across, down, one], dim=1).view(-1, 2, 2))


@dataclass(frozen=True)
class Scale:
    """Scales a sample about its centre by a factor from 1 - `change` to 1 + `change`. The outside is 0, after
    normalisation."""

    __pydantic_config__ = STRICT
    name: Literal["scale"] = "scale"
    change: Change = 0.5

    def check(self, x: Tensor) -> None:
        check_maps(self.name, x)

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        return resampled(x_bchw, self._matrices(len(x_bchw), generator))

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        matrices = self._matrices(len(x_bchw), generator)
        return resampled(x_bchw, matrices), boxes.moved(y, matrices)

    def _matrices(self, count: int, generator: torch.Generator) -> Tensor:
        factor = 1 + self.change * (2 * torch.rand(count, generator=generator) - 1)
        return about_centre(factor.view(-1, 1, 1) * torch.eye(2))


@dataclass(frozen=True)
class MixUp:
    """Lays another sample of the batch over a sample, with probability `share`, and adds its boxes: m x + (1 - m) x'
    with m from Beta(alpha, alpha) (mixup: Beyond Empirical Risk Minimization, Zhang et al., ICLR 2018). Boxes count in
    full, whatever m is, as in YOLOv8.

    A sample stays as it is where it is alone in its batch, and where targets have no room for the boxes of both.
    """

    __pydantic_config__ = STRICT
    boxes_only: ClassVar[bool] = True
    name: Literal["mixup"] = "mixup"
    share: Fraction = 0.5
    alpha: Count = 32

    def check(self, x: Tensor) -> None:
        check_maps(self.name, x)

    def apply(self, x_bchw: Tensor, generator: torch.Generator) -> Tensor:
        raise ModelError("training.augment: mixup needs boxes as targets. Leave it out")

    def apply_with_boxes(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        b, most = y.shape[:2]
        chosen = (torch.rand(b, generator=generator) < self.share).to(y.device)
        # Of 2 alpha - 1 uniform numbers the middle one has the distribution Beta(alpha, alpha).
        weight = torch.rand(b, 2 * self.alpha - 1, generator=generator).median(dim=1).values.to(x_bchw)
        if b == 1:
            return x_bchw, y
        other = (torch.arange(b) + torch.randint(1, b, (b,), generator=generator)).to(y.device) % b
        both = torch.cat([y, y[other]], dim=1)
        held = boxes.present(both)
        chosen &= held.sum(1) <= most
        weight = weight.view(-1, 1, 1, 1)
        mixed = weight * x_bchw + (1 - weight) * x_bchw[other]
        first = (~held).long().sort(dim=1, stable=True).indices[:, :most]  # rows with boxes before rows without
        joined = both.gather(1, first[..., None].expand(-1, -1, y.shape[2]))
        return (
            torch.where(chosen[:, None, None, None], mixed, x_bchw),
            torch.where(chosen[:, None, None], joined, y),
        )


def about_centre(linear_b22: Tensor) -> Tensor:
    """Return the maps p -> A p + t, (B, 2, 3), that keep the image's centre, (1/2, 1/2)."""
    centre = torch.full((2, 1), 0.5)
    return torch.cat([linear_b22, centre - linear_b22 @ centre], dim=2)


def resampled(x_bchw: Tensor, matrices: Tensor) -> Tensor:
    """Return samples after p -> A p + t, `matrices` (B, 2, 3) = [A | t], points as shares of the sample, with bilinear
    interpolation and 0 outside."""
    matrices = matrices.to(x_bchw)
    (a, b), (c, d) = matrices[:, 0, :2].T, matrices[:, 1, :2].T
    back = torch.stack([d, -b, -c, a], dim=1).view(-1, 2, 2) / (a * d - b * c).view(-1, 1, 1)
    # torch asks where each pixel comes from, on axes from -1 to 1.
    from_where = torch.cat([back, back @ (1 - 2 * matrices[:, :, 2:]) - 1], dim=2)
    grid = F.affine_grid(from_where, list(x_bchw.shape), align_corners=False)
    return F.grid_sample(x_bchw, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _stored(x_chw: Tensor, quality: int) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("training.augment: compress needs Pillow: pip install pillow") from error
    pixels = (x_chw.cpu() * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    stored = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(stored, "JPEG", quality=quality)
    read = np.array(Image.open(stored)).reshape(pixels.shape)
    return torch.from_numpy(read).permute(2, 0, 1).to(x_chw) / 255


def check_maps(name: str, x: Tensor) -> None:
    """Raise ModelError if samples like x (N, ...) are neither images nor maps."""
    if x.dim() != IMAGE_AXES or x.dtype == torch.int64:
        kind = "tokens" if x.dtype == torch.int64 else "numbers"
        raise ModelError(
            f"training.augment: {name} needs images or maps (C, H, W), got {kind} of the shape {tuple(x.shape[1:])}. "
            "Leave it out"
        )


def check_colours(name: str, x: Tensor, channels: tuple[int, ...]) -> None:
    """Raise ModelError if normalised samples like x (N, ...) are not pictures with these channels in 0..1."""
    check_maps(name, x)
    low, high = float(x.min()), float(x.max())
    if x.shape[1] not in channels or low < 0 or high > 1:
        raise ModelError(
            f"training.augment: {name} needs pictures of {' or '.join(map(str, channels))} channels with values in "
            f"0..1 (mean 0 and std 1), got {x.shape[1]} from {low:.3g} to {high:.3g}. Leave it out"
        )


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
"""The annotation of a field."""

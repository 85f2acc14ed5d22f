"""Sub-models, and pools of sub-models.

A `ParamLayout` maps channels to entries of tensors, and a `SubmodelSpec` lists the channels and blocks of a sub-model.
Slicing, counting, pruning and averaging use only a layout and a spec.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fl_engine.core.errors import ModelError, nearest

Params = dict[str, Tensor]
"""Map names to tensors, as in a flat `state_dict`."""

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Map the name of each tensor to its type and shape, as in the header of a safetensors file."""

Keep = int | tuple[int, ...]
"""Kept channels of a group: n for the first n channels, or a tuple of ascending indices in the full network."""


@dataclass(frozen=True)
class Axis:
    """Maps a group's channels to indices along one axis of a tensor. An axis with `group=None` is never sliced.

    The axis contains all channels `copies` times. In each copy, a channel has `repeat` consecutive indices. A flattened
    tensor C x H x W has `repeat = H*W`, and a flattened tensor T x C has `copies = T`. An LSTM's weights contain four
    gates, so `copies` is 4. If the axis concatenates several axes, `then` is the next axis. `Axis(None, n)` describes n
    indices that are never sliced. If `choice` is a name, a sub-model keeps as many channels on this axis as in the
    group, but may keep different channels, for example between the two convolutions of a residual block.
    """

    group: str | None
    repeat: int = 1
    copies: int = 1
    then: Axis | None = None
    choice: str | None = None

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.copies < 1:
            raise ModelError(f"repeat and copies of an axis must be at least 1, got {self.repeat} and {self.copies}")

    @property
    def key(self) -> str | None:
        """Name under which a sub-model lists the kept channels of this axis."""
        return self.group if self.choice is None else self.choice

    @property
    def each(self) -> int:
        """Number of indices along the axis that belong to one channel."""
        return self.repeat * self.copies

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The axes that this axis concatenates, in order. If `then` is None, the tuple contains only this axis."""
        return (self,) if self.then is None else (replace(self, then=None), *self.then.parts)

    def length(self, size: int, width: Callable[[str], int]) -> int:
        """Return how many of `size` indices a sub-model with `width(group)` channels of each group keeps."""
        if self.then is None:
            return size if self.group is None else width(self.group) * self.each
        return sum(part.each * (1 if part.group is None else width(part.group)) for part in self.parts)


@dataclass(frozen=True)
class Slot:
    """Block and axes of a parameter."""

    block: str
    axes: tuple[Axis, ...]


HEAD = "classes"
"""Channel group of a network's outputs, which width rules never cut. Stored sub-models contain this name, so it must
not change."""


@dataclass(frozen=True)
class ParamLayout:
    """Maps each group to its number of channels, and each parameter to its `Slot`. Both mappings are in network order.

    Tensors tied by a residual connection share a group, so their slices are always consistent. The network's outputs
    are also a group, named `HEAD`.
    """

    groups: Mapping[str, int]
    slots: Mapping[str, Slot]

    def __post_init__(self) -> None:
        for name, slot in self.slots.items():
            for part in (part for axis in slot.axes for part in axis.parts):
                if part.group is not None and part.group not in self.groups:
                    raise ModelError(f"{name}: group {part.group!r} is not in the layout's groups")
                if part.choice is not None and (part.choice in self.groups or self.choices[part.choice] != part.group):
                    raise ModelError(
                        f"{name}: the choice {part.choice!r} must have one group and must not have a group's name"
                    )

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.block for slot in self.slots.values()))

    @cached_property
    def choices(self) -> dict[str, str | None]:
        """Map each choice (`Axis.choice`) to the channel group of the axis."""
        parts = (part for slot in self.slots.values() for axis in slot.axes for part in axis.parts)
        return {part.choice: part.group for part in parts if part.choice is not None}

    def channels(self, spec: SubmodelSpec) -> dict[str, Keep]:
        """Map each group and choice to the channels that the sub-model keeps."""
        return {name: self.indices(spec, name) for name in (*self.groups, *self.choices)}

    def indices(self, spec: SubmodelSpec, group: str) -> Keep:
        """Return the channels that the sub-model keeps in a group or choice. Raises ModelError for an unknown name."""
        if group in self.groups:
            return spec.kept.get(group, self.groups[group])
        owner = self.choices.get(group)
        if owner is None:
            raise ModelError(f"no channel group {group!r}{nearest(group, self.groups)}")
        return spec.kept[group] if group in spec.kept else self.indices(spec, owner)

    def width(self, spec: SubmodelSpec, group: str) -> int:
        """Return how many channels of `group` the sub-model keeps."""
        keep = self.indices(spec, group)
        return keep if isinstance(keep, int) else len(keep)

    def has_block(self, spec: SubmodelSpec, block: str) -> bool:
        return spec.blocks is None or block in spec.blocks

    def form(self, spec: SubmodelSpec) -> tuple[object, ...]:
        """Return a tuple (widths of all groups except the outputs, blocks) of a sub-model."""
        widths = tuple(self.width(spec, group) for group in self.groups if group != HEAD)
        return widths, tuple(b for b in self.blocks if self.has_block(spec, b))

    def check(self, spec: SubmodelSpec) -> None:
        """Raise ModelError if the network does not have the sub-model's channels or blocks."""
        for group, keep in spec.keep:
            size = self.groups.get(self.choices.get(group) or group)
            if size is None:
                raise ModelError(f"no channel group {group!r}{nearest(group, self.groups)}")
            last = keep if isinstance(keep, int) else keep[-1] + 1
            if last > size:
                raise ModelError(f"group {group!r}: channel indices must be below {size}, got {last - 1}")
            owner = self.choices.get(group)
            if owner is not None and self.width(spec, group) != self.width(spec, owner):
                raise ModelError(
                    f"choice {group!r} must keep as many channels as group {owner!r}, got {self.width(spec, group)}"
                )
        for block in spec.blocks or ():
            if block not in self.blocks:
                raise ModelError(f"no block {block!r}{nearest(block, self.blocks)}")


def _canonical(group: str, keep: int | Iterable[int]) -> Keep:
    if isinstance(keep, int):
        if keep < 1:
            raise ModelError(f"group {group!r}: at least one channel must be kept, got {keep}")
        return keep
    indices = tuple(int(i) for i in keep)
    if not indices or indices[0] < 0 or any(a >= b for a, b in itertools.pairwise(indices)):
        raise ModelError(f"group {group!r}: channel indices must be ascending and not empty, got {indices[:8]}")
    return len(indices) if indices[-1] == len(indices) - 1 else indices


def _is_keep(value: object) -> bool:
    """Return whether a JSON value is a valid `Keep`. Floats and booleans are invalid."""
    return type(value) is int or (isinstance(value, list) and all(type(index) is int for index in value))


@dataclass(frozen=True)
class SubmodelSpec:
    """Channels and blocks that a sub-model keeps. A group without an entry keeps all channels. A choice without an
    entry keeps the channels of its group. Create a spec with `SubmodelSpec.of({"conv1": 32, "conv2": [0, 3, 5]})`.

    The kept channels 0 to n - 1 are always stored as the integer n, so specs of the same sub-model compare equal.
    """

    keep: tuple[tuple[str, Keep], ...] = ()
    blocks: tuple[str, ...] | None = None
    """Kept blocks; None keeps all blocks."""

    @staticmethod
    def of(keep: Mapping[str, int | Iterable[int]], blocks: Iterable[str] | None = None) -> SubmodelSpec:
        pairs = tuple(sorted((group, _canonical(group, value)) for group, value in keep.items()))
        return SubmodelSpec(pairs, None if blocks is None else tuple(sorted(set(blocks))))

    @cached_property
    def kept(self) -> dict[str, Keep]:
        return dict(self.keep)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.keep, self.blocks))

    def to_json(self) -> dict[str, Any]:
        keep = {group: value if isinstance(value, int) else list(value) for group, value in self.keep}
        return {"keep": keep, "blocks": None if self.blocks is None else list(self.blocks)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SubmodelSpec:
        if set(value) != {"keep", "blocks"}:
            raise ModelError(f"the JSON of a sub-model must have the keys keep and blocks, got {sorted(value)}")
        keep, blocks = value["keep"], value["blocks"]
        if not isinstance(keep, Mapping) or not all(_is_keep(kept) for kept in keep.values()):
            raise ModelError(f"keep must map each group to a number or a list of channels, got {repr(keep)[:200]}")
        if blocks is not None and not (isinstance(blocks, list) and all(isinstance(b, str) for b in blocks)):
            raise ModelError(f"blocks must be a list of names or null, got {repr(blocks)[:200]}")
        return SubmodelSpec.of(keep, blocks)


FULL = SubmodelSpec()
"""The whole network."""


@runtime_checkable
class Codec(Protocol):
    """Encodes weights for transfer. A codec is a frozen dataclass of options with pure methods.

    Inputs are contiguous floating-point tensors on the CPU, sorted by name. The server encodes weights, and a client
    encodes the change of the received weights. The name of an encoded tensor must begin with the name of an input or
    contain a slash, and must not begin with `state/`.
    """

    def encode(self, tensors: Params, seed: int) -> Params:
        """Return the encoded tensors. All random numbers must be derived from `seed`. Raises ModelError for numbers
        that the codec cannot represent."""

    def decode(self, encoded: Params, header: Header) -> Params:
        """Return tensors with the types and shapes of `header`. The names, types and shapes of `encoded` are valid, but
        the values are not trusted. Raises IntegrityError for values that `encode` never returns."""

    def header(self, header: Header) -> Header:
        """Return the header of the encoded tensors. The size of a flat uint8 tensor (a byte stream) is an upper bound.
        Fewer or smaller inputs must never require more bytes."""


@dataclass(frozen=True)
class Codecs:
    """Codecs for transfers to clients (`down`) and from clients (`up`); None sends weights unencoded."""

    down: Codec | None = None
    up: Codec | None = None


@dataclass(frozen=True)
class Prunable:
    """A layer, or block of layers, that a pool may prune.

    Attributes:
        group: Channel group of the layer's width.
        params: Name prefixes of the layer's parameters. The number of parameters determines AdjW (FlexFL Eq. 3).
        activations: Names of the layer's ReLUs, which determine APoZ (FlexFL Eq. 1-2). Empty for an LSTM.
    """

    group: str
    params: tuple[str, ...]
    activations: tuple[str, ...]


@dataclass(frozen=True)
class PoolModel:
    """One member of a model pool.

    Attributes:
        params: Number of parameters.
        share: `params` divided by the number of parameters of the full model.
        macs: Multiply-adds per sample.
        dispatched: True if the server sends this model. Other models are created only by pruning on the device.
        reported: True if the mean accuracy includes this model.
        gamma: Gamma that a pool search found; None without a search.
        ratios: Width ratios of the prunable layers.
        ensemble: True if the output is the mean of the logits of all exits. Otherwise only the last exit is used.
        static_bn: True if batch norm uses statistics of the training data instead of the batch.
        codecs: Codecs of the transfers; None uses the run's codecs.
        sizes: A tuple (bytes sent to a client, bytes returned by a client); None means 4 bytes per parameter. If the
            encoded size depends on the values, the sizes are upper bounds.
        tiers: Pairs (tier, codecs) of the tiers that receive this model; codecs None means the run's codecs. If no
            model of the pool lists tiers, the selection chooses the models.
    """

    name: str
    spec: SubmodelSpec
    params: int
    share: float
    macs: int
    dispatched: bool
    reported: bool
    gamma: float | None = None
    ratios: tuple[float, ...] = ()
    ensemble: bool = False
    static_bn: bool = False
    codecs: Codecs | None = None
    sizes: tuple[int, int] | None = None
    tiers: tuple[tuple[str, Codecs | None], ...] = ()

    @property
    def bytes(self) -> int:
        """Number of bytes sent to a client."""
        return 4 * self.params if self.sizes is None else self.sizes[0]

    @property
    def bytes_up(self) -> int:
        """Number of bytes that a client returns after training the whole model."""
        return 4 * self.params if self.sizes is None else self.sizes[1]


Pool = tuple[PoolModel, ...]
"""Models of a pool, from the smallest to the largest."""

Prepared = Mapping[str, Any]
"""Map the name of each preparation of an algorithm to the result of the preparation (`contracts.Preparation`)."""

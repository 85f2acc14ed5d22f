"""Sub-models: a `ParamLayout` says which entries of which tensors belong to one channel, and a `SubmodelSpec` says
which channels and blocks are kept. Slicing, counting, sending, pruning and averaging follow from these two values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fl_engine.core.errors import ModelError, nearest

Params = dict[str, Tensor]
"""Flat `state_dict` names to tensors."""

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors by name, as in the header of a safetensors file."""

Keep = int | tuple[int, ...]
"""Kept channels of a group: a prefix length, or ascending global indices."""


@dataclass(frozen=True)
class Axis:
    """One axis of one tensor: its channel group (None: never sliced) and which entries belong to one channel.

    The axis has `copies` runs over all channels, and in each run a channel has `repeat` consecutive entries. A flatten
    of C x H x W has `repeat = H*W`, and a flatten of T x C has `copies = T`. An LSTM's weights hold four gates, so
    `copies = 4`.

    In a concatenation the channels of another axis follow, `then`. There `Axis(None, n)` stands for n entries that are
    never sliced.

    With a name as `choice`, a sub-model may keep other channels here than in the rest of the group, but as many. An
    example are the channels between two convolutions of a residual block.
    """

    group: str | None
    repeat: int = 1
    copies: int = 1
    then: Axis | None = None
    choice: str | None = None

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.copies < 1:
            raise ModelError(
                f"repeat and copies of an axis of group {self.group!r} must be at least 1, got {self.repeat} and "
                f"{self.copies}"
            )

    @property
    def key(self) -> str | None:
        """The name under which a sub-model lists the kept channels of this axis."""
        return self.group if self.choice is None else self.choice

    @property
    def each(self) -> int:
        """Number of entries of one channel."""
        return self.repeat * self.copies

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The concatenated axes, in order; without `then` the axis itself."""
        return (self,) if self.then is None else (replace(self, then=None), *self.then.parts)

    def length(self, size: int, width: Callable[[str], int]) -> int:
        """Return how many of `size` entries a sub-model keeps that has `width(group)` channels of a group."""
        if self.then is None:
            return size if self.group is None else width(self.group) * self.each
        return sum(part.each * (1 if part.group is None else width(part.group)) for part in self.parts)


@dataclass(frozen=True)
class Slot:
    """The block of a parameter, and its axes."""

    block: str
    axes: tuple[Axis, ...]


HEAD = "classes"
"""The channel group of a network's outputs, which no rule cuts. The name is part of stored sub-models."""

FORMS_KEPT = 1024
"""Bounds the cache of forms, because rolling windows have new ones in every round."""


@dataclass(frozen=True)
class ParamLayout:
    """Channel counts of all groups, and a slot for each parameter, both in network order.

    Tensors tied by a residual connection share a group, so an inconsistent slice cannot be expressed. The outputs are a
    group too, named `HEAD`.
    """

    groups: Mapping[str, int]
    slots: Mapping[str, Slot]

    def __post_init__(self) -> None:
        for name, slot in self.slots.items():
            for part in (part for axis in slot.axes for part in axis.parts):
                if part.group is not None and part.group not in self.groups:
                    raise ModelError(f"{name}: group {part.group!r} is not in the layout's groups")
                if part.choice is not None and (part.choice in self.groups or self.choices[part.choice] != part.group):
                    raise ModelError(f"{name}: the choice {part.choice!r} is a group's name, or of two groups")

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.block for slot in self.slots.values()))

    @cached_property
    def choices(self) -> dict[str, str | None]:
        """Map each choice (`Axis.choice`) to its group."""
        parts = (part for slot in self.slots.values() for axis in slot.axes for part in axis.parts)
        return {part.choice: part.group for part in parts if part.choice is not None}

    def channels(self, spec: SubmodelSpec) -> dict[str, Keep]:
        """Return the global channels that the sub-model keeps, by group and choice."""
        return {name: self.indices(spec, name) for name in (*self.groups, *self.choices)}

    def indices(self, spec: SubmodelSpec, group: str) -> Keep:
        """Return the global channels of a group or choice that the sub-model keeps. Raises ModelError for an unknown
        name."""
        if group in self.groups:
            return spec.kept.get(group, self.groups[group])
        of = self.choices.get(group)
        if of is None:
            raise ModelError(f"no channel group {group!r}{nearest(group, self.groups)}")
        return spec.kept[group] if group in spec.kept else self.indices(spec, of)

    def width(self, spec: SubmodelSpec, group: str) -> int:
        """Return how many channels of `group` the sub-model keeps."""
        keep = self.indices(spec, group)
        return keep if isinstance(keep, int) else len(keep)

    def has_block(self, spec: SubmodelSpec, block: str) -> bool:
        return spec.blocks is None or block in spec.blocks

    def form(self, spec: SubmodelSpec) -> tuple[object, ...]:
        """Return the widths, without the outputs', and the blocks of a sub-model."""
        found = self._forms.get(spec)
        if found is None:
            if len(self._forms) >= FORMS_KEPT:
                self._forms.clear()
            widths = tuple(self.width(spec, group) for group in self.groups if group != HEAD)
            found = self._forms[spec] = (widths, tuple(b for b in self.blocks if self.has_block(spec, b)))
        return found

    @cached_property
    def _forms(self) -> dict[SubmodelSpec, tuple[object, ...]]:
        return {}

    def check(self, spec: SubmodelSpec) -> None:
        """Raise ModelError if the network does not have the sub-model's channels or blocks."""
        for group, keep in spec.keep:
            size = self.groups.get(self.choices.get(group) or group)
            if size is None:
                raise ModelError(f"no channel group {group!r}{nearest(group, self.groups)}")
            last = keep if isinstance(keep, int) else keep[-1] + 1
            if last > size:
                raise ModelError(f"group {group!r} has {size} channels, got index {last - 1}")
            of = self.choices.get(group)
            if of is not None and self.width(spec, group) != self.width(spec, of):
                raise ModelError(
                    f"choice {group!r} must keep as many channels as its group {of!r}, {self.width(spec, of)}, got "
                    f"{self.width(spec, group)}"
                )
        for block in spec.blocks or ():
            if block not in self.blocks:
                raise ModelError(f"no block {block!r}{nearest(block, self.blocks)}")


def _canonical(group: str, keep: int | Iterable[int]) -> Keep:
    if isinstance(keep, int):
        if keep < 1:
            raise ModelError(f"group {group!r}: at least one channel must stay, got {keep}")
        return keep
    indices = tuple(int(i) for i in keep)
    if not indices or indices[0] < 0 or any(a >= b for a, b in itertools.pairwise(indices)):
        raise ModelError(f"group {group!r}: indices must be ascending and not empty, got {indices[:8]}")
    return len(indices) if indices[-1] == len(indices) - 1 else indices


def _is_keep(value: object) -> bool:
    """Return whether a JSON value is a `Keep`. 1.5 and true are not."""
    return type(value) is int or (isinstance(value, list) and all(type(index) is int for index in value))


@dataclass(frozen=True)
class SubmodelSpec:
    """Kept channels per group (absent: all) or choice (absent: as its group), and kept blocks (None: all). Immutable,
    hashable, JSON. Create one with `SubmodelSpec.of({"conv1": 32, "conv2": [0, 3, 5]})`.

    A prefix is stored as its length, so its slices are views, and equal sub-models compare equal.
    """

    keep: tuple[tuple[str, Keep], ...] = ()
    blocks: tuple[str, ...] | None = None

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
            raise ModelError(f"a sub-model must have the keys keep and blocks, got {sorted(value)}")
        keep, blocks = value["keep"], value["blocks"]
        if not isinstance(keep, Mapping) or not all(_is_keep(kept) for kept in keep.values()):
            raise ModelError(f"keep must map groups to numbers of channels or to indices, got {repr(keep)[:200]}")
        if blocks is not None and not (isinstance(blocks, list) and all(isinstance(b, str) for b in blocks)):
            raise ModelError(f"blocks must be a list of names or null, got {repr(blocks)[:200]}")
        return SubmodelSpec.of(keep, blocks)


FULL = SubmodelSpec()
"""The whole network."""

"""Sub-models: which entries of which tensors belong to one channel, and which channels are kept.

Everything the engine does with a sub-model - slicing, counting, sending, pruning on the device, averaging -
follows from two values: a `ParamLayout` (which entries of which tensors belong to one channel) and a
`SubmodelSpec` (which channels and which blocks are kept).
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
"""Type and shape of tensors, by name: what the header of a safetensors file says."""

Keep = int | tuple[int, ...]
"""Kept channels of a group: a prefix length, or ascending global indices."""


@dataclass(frozen=True)
class Axis:
    """One axis of one tensor: its channel group (None: never sliced) and which entries belong to one channel.

    The axis is `copies` runs over all channels, one after the other; in each run a channel has `repeat` consecutive
    entries. A flatten of C x H x W has `repeat = H*W`; an inverted residual that expands six times has `repeat = 6`.
    The weights of an LSTM hold its four gates one after the other, `copies = 4`; a flatten of T x C, a window of a
    series, has `copies = T`; an output that joins two directions has `copies = 2`.

    A concatenation goes on with the channels of another axis, `then`. There `Axis(None, n)` is n entries that are never
    sliced.

    With `choice`, a name, a sub-model may keep other channels here than elsewhere in the group, as many: the channels
    between two convolutions of a residual block, which no sum ties to others. What names no choice follows the group.
    """

    group: str | None
    repeat: int = 1
    copies: int = 1
    then: Axis | None = None
    choice: str | None = None

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.copies < 1:
            raise ModelError(
                f"an axis of group {self.group!r} has at least one entry per channel and one run over the channels, "
                f"got repeat={self.repeat}, copies={self.copies}"
            )

    @property
    def key(self) -> str | None:
        """What the kept channels of this axis are listed under."""
        return self.group if self.choice is None else self.choice

    @property
    def each(self) -> int:
        """How many entries one channel has."""
        return self.repeat * self.copies

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The axes that this one joins, in order; without `then`, itself."""
        return (self,) if self.then is None else (replace(self, then=None), *self.then.parts)

    def length(self, size: int, width: Callable[[str], int]) -> int:
        """How many entries a sub-model keeps of `size`, where it keeps `width(group)` channels of a group."""
        if self.then is None:
            return size if self.group is None else width(self.group) * self.each
        return sum(part.each * (1 if part.group is None else width(part.group)) for part in self.parts)


@dataclass(frozen=True)
class Slot:
    """Where a parameter lives: the block it belongs to, and what governs each of its axes."""

    block: str
    axes: tuple[Axis, ...]


HEAD = "classes"
"""The channel group of a network's outputs, which no rule cuts. Stored sub-models have it under this name, whatever the
task."""

FORMS_KEPT = 1024
"""The most forms that a layout remembers: a pool has a handful, rolling windows have new ones in every round."""


@dataclass(frozen=True)
class ParamLayout:
    """Channel counts of all groups, and a slot for each parameter, both in network order.

    Tensors tied by a residual connection share a group, so an inconsistent slice cannot be written down.
    The outputs are a group like any other, named `HEAD`.
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
        """By choice (`Axis.choice`), its group."""
        parts = (part for slot in self.slots.values() for axis in slot.axes for part in axis.parts)
        return {part.choice: part.group for part in parts if part.choice is not None}

    def channels(self, spec: SubmodelSpec) -> dict[str, Keep]:
        """Which global channels the sub-model keeps, by group and by choice."""
        return {name: self.indices(spec, name) for name in (*self.groups, *self.choices)}

    def indices(self, spec: SubmodelSpec, group: str) -> Keep:
        """Which global channels of `group`, or of a choice, the sub-model keeps. Raises ModelError for a group that
        does not exist."""
        if group in self.groups:
            return spec.kept.get(group, self.groups[group])
        of = self.choices.get(group)
        if of is None:
            raise ModelError(f"no channel group {group!r}{nearest(group, self.groups)}")
        return spec.kept[group] if group in spec.kept else self.indices(spec, of)

    def width(self, spec: SubmodelSpec, group: str) -> int:
        """How many channels of `group` the sub-model keeps."""
        keep = self.indices(spec, group)
        return keep if isinstance(keep, int) else len(keep)

    def has_block(self, spec: SubmodelSpec, block: str) -> bool:
        return spec.blocks is None or block in spec.blocks

    def form(self, spec: SubmodelSpec) -> tuple[object, ...]:
        """Widths and blocks, which sub-models of the same form have in common. The outputs do not count."""
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
        """Raises ModelError where the specification asks for what the network does not have."""
        for group, keep in spec.keep:
            size = self.groups.get(self.choices.get(group) or group)
            if size is None:
                raise ModelError(f"no channel group {group!r}{nearest(group, self.groups)}")
            last = keep if isinstance(keep, int) else keep[-1] + 1
            if last > size:
                raise ModelError(f"group {group!r} has {size} channels, the sub-model asks for index {last - 1}")
            of = self.choices.get(group)
            if of is not None and self.width(spec, group) != self.width(spec, of):
                raise ModelError(
                    f"choice {group!r} keeps {self.width(spec, group)} channels, its group {of!r} "
                    f"{self.width(spec, of)}: give it as many"
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
        raise ModelError(f"group {group!r}: indices must be ascending, distinct and not empty, got {indices[:8]}")
    return len(indices) if indices[-1] == len(indices) - 1 else indices


def _is_keep(value: object) -> bool:
    """Whether JSON says a `Keep`: 1.5 or true are no channel."""
    return type(value) is int or (isinstance(value, list) and all(type(index) is int for index in value))


@dataclass(frozen=True)
class SubmodelSpec:
    """Kept channels per group (absent: all) or choice (`Axis.choice`; absent: those of its group), and kept blocks
    (None: all). Immutable, hashable, JSON.

    A prefix is stored as its length, so that slicing it makes views and equal sub-models compare equal.
    Use `SubmodelSpec.of({"conv1": 32, "conv2": [0, 3, 5]})` to write one by hand.
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
            raise ModelError(f"a sub-model is {{keep, blocks}}, got the keys {sorted(value)}")
        keep, blocks = value["keep"], value["blocks"]
        if not isinstance(keep, Mapping) or not all(_is_keep(kept) for kept in keep.values()):
            raise ModelError(f"keep says a number of channels for each group, or their indices, got {repr(keep)[:200]}")
        if blocks is not None and not (isinstance(blocks, list) and all(isinstance(b, str) for b in blocks)):
            raise ModelError(f"the blocks of a sub-model are a list of names, or null, got {repr(blocks)[:200]}")
        return SubmodelSpec.of(keep, blocks)


FULL = SubmodelSpec()
"""The whole network."""

"""The vocabulary: what a model, a sub-model, an order and an update are. What can be plugged in: `core.contracts`.

Everything the engine does with a sub-model - slicing, counting, sending, pruning on the device, averaging -
follows from two values: a `ParamLayout` (which entries of which tensors belong to one channel) and a
`SubmodelSpec` (which channels and which blocks are kept).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fl_engine.core.augmentation import Augmentation
from fl_engine.core.errors import ModelError, nearest
from fl_engine.core.samplers import Sampler, Shuffle
from fl_engine.core.schedules import Constant, Schedule

Params = dict[str, Tensor]
"""Flat `state_dict` names to tensors."""

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors, by name: what the header of a safetensors file says."""

Keep = int | tuple[int, ...]
"""Kept channels of a group: a prefix length, or ascending global indices."""


# ---------------------------------------------------------------------------------------------- sub-models
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


# --------------------------------------------------------------------------------------------------- models
@dataclass(frozen=True)
class Prunable:
    """One layer (or block of layers) as a pool prunes it: the group that sets its width, the name prefixes of
    its parameters (its size counts for AdjW, FlexFL Eq. 3), and its ReLU modules (APoZ, FlexFL Eq. 1-2); none where it
    has no ReLU, as an LSTM (`pool.UNMEASURED`)."""

    group: str
    params: tuple[str, ...]
    activations: tuple[str, ...]


# -------------------------------------------------------------------------------------------------- devices
@dataclass(frozen=True)
class Device:
    """One device of the fleet. `memory` is its capacity r_M in % of the full model's parameters; `sigma` the
    spread of what it has free, in the same unit (FlexFL Table I). `limits` bound what it has free, where that is a
    clipped Gaussian (AdaptiveFL). `speed` in multiply-adds per second and `bandwidth` in bytes per second drive the
    simulated clock."""

    client: int
    tier: str
    memory: float
    sigma: float
    limits: tuple[float, float] | None = None
    speed: float = 1e9
    bandwidth: float = 1e6

    @cached_property
    def most(self) -> float:
        """The most it can ever have free, in % of the full model's parameters."""
        return self.memory if self.limits is None else self.limits[1]


# ----------------------------------------------------------------------------------------- orders and updates
class Codec(Protocol):
    """Turns weights into other tensors for their way. A frozen dataclass of options, whose functions depend on their
    arguments alone.

    It gets floating-point tensors, contiguous, on the CPU, sorted by name; running statistics and integers travel
    uncoded. On the way down these are weights, on the way up the change against the weights that were received. The
    names of the tensors that it makes begin with a name that it was given, or contain a slash, which no name of a
    network does; they do not begin with `state/`.
    """

    def encode(self, tensors: Params, seed: int) -> Params:
        """The tensors that travel instead. Every random choice follows from `seed`. It differs for each round and
        direction, and on the way up for each client; on the way down clients that are sent models of one level share
        it. Raises ModelError for numbers that it cannot express."""

    def decode(self, encoded: Params, header: Header) -> Params:
        """Tensors of these types and shapes. `encoded` may come from a stranger: it has the names, types and shapes
        that `header` gives, and any content. Raises IntegrityError for content that `encode` never makes."""

    def header(self, header: Header) -> Header:
        """The header of what `encode` makes from tensors with this header. A flat tensor of uint8 is a stream, which
        may be shorter than said here. Fewer or smaller tensors never make more."""


@dataclass(frozen=True)
class Codecs:
    """The codec of each direction; None: weights travel as they are."""

    down: Codec | None = None
    up: Codec | None = None


@dataclass(frozen=True)
class WorkOrder:
    """What one client is asked to do. `level` is the index of the pool model that it is sent, or whose size it has;
    `hints` is small JSON that the algorithm's own `task` understands.

    `memory` is what a client remembers of earlier rounds. Tensors that the server computes itself (FedDyn) have the
    parameters' names; a device has them too, so they do not count as traffic. The client's own state
    (`contracts.KeepsClientState`) is named `state/<name>`; the engine adds it, and it counts as traffic.

    `codecs` are those that the algorithm's `plan` gives, else those of the level or of the run, which the engine fills
    in. Where the way down is coded, `encoded` is what travels, and `payload` is what a client decodes from it.
    """

    round: int
    client: int
    spec: SubmodelSpec
    payload: Params
    seed: int
    level: int
    hints: Mapping[str, Any] = field(default_factory=dict)
    memory: Params = field(default_factory=dict)
    codecs: Codecs | None = None
    encoded: Params | None = None
    evaluates: bool = False
    """The client trains nothing: it evaluates `payload` on the samples that it holds out from training."""

    @property
    def travels(self) -> Params:
        """The tensors that are sent."""
        return self.payload if self.encoded is None else self.encoded


@dataclass(frozen=True)
class RoundPlan:
    round: int
    orders: tuple[WorkOrder, ...]
    wanted: int | None = None
    """How many updates are merged at most, where more clients are asked; None: all."""
    adopted: int = 0
    """How many updates of this round were there already when the coordinator started again."""
    noise_seed: bytes | None = None
    """For noise that hides single clients (`privacy`): 256 bits that follow from the run's key, not from its seed."""
    evaluates: bool = False
    """All orders are to evaluate (`WorkOrder.evaluates`)."""

    @property
    def label(self) -> str:
        """Tells the round's orders from those of its evaluation: `12`, `12e`."""
        return f"{self.round}e" if self.evaluates else f"{self.round}"

    @property
    def enough(self) -> int:
        """How many updates the round takes at most."""
        return len(self.orders) if self.wanted is None else self.wanted

    @cached_property
    def order_of(self) -> dict[int, WorkOrder]:
        """By client."""
        return {order.client: order for order in self.orders}


@dataclass(frozen=True)
class ClientUpdate:
    """What a client brings back: the sub-model that it really trained, as tensors on the CPU, whatever trained it. A
    name absent from `payload` was not trained.

    Of an order that evaluates the payload is empty, `num_examples` counts the samples held out, and `metrics` are those
    of `measures.evaluation_bounds`.

    `num_examples` is the client's sample count |d|; `metrics` are floats such as `loss` and `seconds`. The server adds
    three fields when it has the update: `level`, the index of the pool model that was trained (None: the sub-model is
    not in the pool), `elapsed`, the seconds that the order took on the simulated clock, and `seconds_decode`, those
    that the server needed to decode it. `state` is what the client keeps (`contracts.KeepsClientState`): the engine
    removes it before the merge.

    Where the way up is coded, `encoded` is what travels; on the server `payload` is what was decoded from it.
    """

    round: int
    client: int
    spec: SubmodelSpec
    payload: Params
    num_examples: int
    metrics: Mapping[str, float]
    level: int | None = None
    elapsed: float = 0.0
    state: Params = field(default_factory=dict)
    encoded: Params | None = None
    seconds_decode: float = 0.0

    @property
    def travels(self) -> Params:
        """The weights that are sent."""
        return self.payload if self.encoded is None else self.encoded


R = TypeVar("R", ClientUpdate, "ClientFailure", "LocalTask")


def changed(record: R, **fields: Any) -> R:
    """`dataclasses.replace` in a tenth of the time: each round changes a few fields of each client's task and
    outcome."""
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **fields)
    return new


Stage = Literal["drop", "prune", "train", "evaluate", "pod", "validate", "straggle", "quorum"]
"""Where a client failed: it dropped out, had no room, could not train or evaluate, or lost its pod; or its update
failed validation, came too late, or was one of too few."""

Code = Literal[
    "file", "schema", "order", "signature", "spec", "checksum", "names", "dtype", "shape", "encoding", "finite",
    "statistics", "examples", "metrics", "norm", "unreadable",
]  # fmt: skip
"""Why an update failed validation (see `exchange.updates`)."""


@dataclass(frozen=True)
class ClientFailure:
    """A client that brought no update, or one that was refused. `reason` is for people; the stage `validate` has a
    `code`. The server adds `elapsed` where an update came: the seconds that the order took on the simulated clock."""

    round: int
    client: int
    stage: Stage
    reason: str
    code: Code | None = None
    elapsed: float = 0.0


Outcome = ClientUpdate | ClientFailure


# ---------------------------------------------------------------------------------------------- model pools
@dataclass(frozen=True)
class PoolModel:
    """One member of a model pool, with what it costs.

    `share` is its parameter count over the full model's; `macs` counts multiply-adds per sample; `dispatched`
    members are sent by the server, the others are reached only by pruning on the device; `reported` members
    enter the mean accuracy. `gamma` and `ratios` (per prunable layer) say how it was found, where it was.

    How it is used: with `ensemble`, its answer is the mean of the logits of all its exits, otherwise that of the
    last; with `static_bn`, its batch norm takes statistics collected on the training data instead of the batch's.

    How it travels: by `codecs` (None: those of the run). `sizes` are the bytes of its tensors on the way down and up
    (None: 4 for each parameter); where a codec's bytes depend on the numbers, the most.

    `tiers` names the tiers of the fleet whose devices are sent this model, each with its codecs (None: the run's).
    Where no member of a pool names any, the selection decides.
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
        """Bytes on the way down."""
        return 4 * self.params if self.sizes is None else self.sizes[0]

    @property
    def bytes_up(self) -> int:
        """Bytes on the way up, where all of it comes back."""
        return 4 * self.params if self.sizes is None else self.sizes[1]


Pool = tuple[PoolModel, ...]
"""Members from the smallest to the largest."""

Prepared = Mapping[str, Any]
"""The results of an algorithm's preparations, by the preparation's name (`contracts.Preparation`)."""


# --------------------------------------------------------------------------------------------- local training
@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` by name; the learning rate is that of this round, decay included (see `LocalTask.schedule`)."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam:
    lr: float
    reset: bool = False
    """Each epoch begins with a new optimiser, without moments and at step 0."""


@dataclass(frozen=True)
class OwnOptimizer:
    """The `torch.optim.Optimizer` that the function `name`, a `package.module:NAME`, makes for this learning rate."""

    lr: float
    name: str


@dataclass(frozen=True)
class Distillation:
    """Self-distillation: mean over `teachers` (sub-models of the trained one) of KL, times `weight`."""

    teachers: tuple[SubmodelSpec, ...]
    weight: float
    temperature: float
    training: bool = True
    """False: the teachers drop no units. Their batch norm takes the batch's statistics either way: running ones are the
    student's."""


@dataclass(frozen=True)
class ExitLoss:
    """Training of all exits of a multi-exit network: cross entropy of exit j times `weights[j]`, plus `kd_weight`
    times a distillation between exits: `last` teaches the others (ScaleFL), or `all` teach each other (DepthFL)."""

    weights: tuple[float, ...]
    kd_weight: float
    temperature: float
    teachers: Literal["last", "all"]


@dataclass(frozen=True)
class Sandwich:
    """How a step trains `LocalTask.widths` together: the last of them, the largest, on the targets; the first, the
    smallest, and `random` others, drawn uniformly and distinct, on the targets and on the largest's outputs: KL times
    `weight`. The step's loss is the mean over these sub-models."""

    random: int
    weight: float
    temperature: float


Scaler = float | Literal["by_layer"]


@dataclass(frozen=True)
class LocalTask:
    """A description of one client's training, for `local.train`: nothing in it runs."""

    spec: SubmodelSpec
    optimizer: SGD | Adam | OwnOptimizer
    epochs: int
    batch_size: int
    drop_last: bool
    seed: int
    distillation: Distillation | None = None
    clip_norm: float | None = None
    """Largest norm of the gradient over all parameters."""
    exits: ExitLoss | None = None
    widths: tuple[SubmodelSpec, ...] = ()
    """Sub-models of the trained one; each step trains one of them, drawn uniformly (ordered dropout)."""
    sandwich: Sandwich | None = None
    """With it, each step trains several of `widths`, of which the last is `spec`."""
    proximal: float = 0.0
    """mu: adds mu/2 * ||theta - anchor||^2 to the loss, for each client by itself. The anchor is what training starts
    from, unless the caller of `local.train` gives another."""
    proximal_squared: bool = True
    """False: adds mu * ||theta - anchor|| instead (L2 over all weights); its gradient is 0 at the anchor."""
    scaler: Scaler = 1.0
    """Divides the output of every layer but the classifier, in training only (HeteroFL): one number for all layers, or
    with `by_layer`, for each the share of its outputs that the sub-model keeps."""
    mask_labels: bool = False
    """The logits of classes that the client does not hold are 0, its teachers' too, and their rows are not sent back
    (HeteroFL)."""
    sampler: Sampler = Shuffle()
    augment: tuple[Augmentation, ...] = ()
    """Changes of the samples, made one after the other on every batch."""
    schedule: Schedule = Constant()
    """How the optimiser's learning rate changes over the steps of this task."""
    objective: str | None = None
    """A function, `package.module:NAME`, that gives the loss of a batch instead of the task of the data and of
    `distillation`, `exits` and `widths`, which cannot stand beside it (`training.own`)."""


@dataclass(frozen=True)
class Start:
    """What a client's training starts from: the weights of `task.spec`; and `linear`, by parameter what is subtracted
    from its gradient at every step (FedDyn, SCAFFOLD), shapes of the weights."""

    params: Params
    linear: Params = field(default_factory=dict)


@dataclass(frozen=True)
class TaskContext:
    """What a client knows when it turns an order into a task."""

    layout: ParamLayout
    pool: Pool
    device: Device
    observed: float
    """Free resources now, in % of the full model's parameters (`devices.observe`)."""


# ------------------------------------------------------------------------------------------- what a server knows
Pick = tuple[int, int]
"""(client, index of the pool model)"""

Tables = dict[str, tuple[tuple[float, ...], ...]]
"""What a selector remembers: named tables, rows of numbers. JSON."""


@dataclass(frozen=True)
class RoundContext:
    """What the server knows when it plans a round. `seed` is the run's (under private aggregation, one that follows
    from the run's key)."""

    round: int
    seed: int
    fleet: tuple[Device, ...]
    """All devices; client i is number i. Their speeds and bandwidths are nominal, whatever a trace says."""
    available: tuple[Device, ...]
    """Those that can be asked now, in client order, with the speed and the bandwidth that they have now."""
    pool: Pool
    clock: float = 0.0
    """When the round begins on the simulated clock: seconds that the earlier rounds took, and those in
    which nobody was online."""
    over_provision: float = 1.0
    """How many times more clients are asked than updates are merged."""
    slots: int | None = None
    """The most clients that can be asked now, where others are still at work; None: any number."""
    samples: tuple[int, ...] = ()
    """How many training samples each client holds, by its number; empty: not known."""
    draws: tuple[int, ...] = ()
    """How many samples each client trains on in a round, repeats counted, by its number; empty: not known."""

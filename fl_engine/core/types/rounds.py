"""A round: the devices, what the server knows of them when it plans, its orders, and the clients' answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from fl_engine.core.types.pools import Codecs, Pool
from fl_engine.core.types.submodels import ParamLayout, Params, SubmodelSpec
from fl_engine.core.types.training import LocalTask

Pick = tuple[int, int]
"""(client, index of the pool model)"""

Tables = dict[str, tuple[tuple[float, ...], ...]]
"""What a selector remembers: named tables, rows of numbers. JSON."""


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
    """How many times as many clients are asked as updates merged."""
    slots: int | None = None
    """The most clients that can be asked now, where others are still at work; None: any number."""
    samples: tuple[int, ...] = ()
    """How many training samples each client holds, by its number; empty: not known."""
    draws: tuple[int, ...] = ()
    """How many samples each client trains on in a round, repeats counted, by its number; empty: not known."""


@dataclass(frozen=True)
class WorkOrder:
    """What one client is asked to do. `level` is the index of the pool model that it is sent, or whose size it has;
    `hints` is small JSON that the algorithm's own `task` understands.

    `memory` is what a client is told of earlier rounds. Tensors that the server computes itself (FedDyn's gradients,
    SCAFFOLD's variate) have the parameters' names. The client's own state (`contracts.KeepsClientState`) is named
    `state/<name>`; the engine adds it. All of it travels, and counts as traffic.

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
"""Why an update failed validation (see `exchange.updates`). `finite` is also the code of training that diverged."""


@dataclass(frozen=True)
class ClientFailure:
    """A client that brought no update, or one that was refused. `reason` is for people. A failure at the stage
    `validate`, or of training that diverged, has a `code`. The server adds `elapsed` where an update came: the seconds
    that the order took on the simulated clock."""

    round: int
    client: int
    stage: Stage
    reason: str
    code: Code | None = None
    elapsed: float = 0.0


Outcome = ClientUpdate | ClientFailure


@dataclass(frozen=True)
class TaskContext:
    """What a client knows when it turns an order into a task."""

    layout: ParamLayout
    pool: Pool
    device: Device
    observed: float
    """Free resources now, in % of the full model's parameters (`devices.observe`)."""

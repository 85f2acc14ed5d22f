"""A round: the devices, the server's view when it plans, the assignments, and the clients' results."""

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
"""What a selector has learned: named tables of numbers. JSON."""


@dataclass(frozen=True)
class Device:
    """One device of the fleet.

    Attributes:
        memory: Its capacity r_M in % of the full model's parameters.
        sigma: The spread of its free memory, in the same unit (FlexFL Table I).
        limits: Bounds of its free memory, if that is a clipped Gaussian (AdaptiveFL).
        speed: Multiply-adds per second on the simulated clock.
        bandwidth: Bytes per second on the simulated clock.
    """

    client: int
    tier: str
    memory: float
    sigma: float
    limits: tuple[float, float] | None = None
    speed: float = 1e9
    bandwidth: float = 1e6

    @cached_property
    def most(self) -> float:
        """The most free memory that it can have, in % of the full model's parameters."""
        return self.memory if self.limits is None else self.limits[1]


@dataclass(frozen=True)
class RoundContext:
    """What the server knows when it plans a round."""

    round: int
    seed: int
    """The run's seed. With private aggregation a seed that follows from the run's key."""
    fleet: tuple[Device, ...]
    """All devices in client order, with their nominal speeds and bandwidths."""
    available: tuple[Device, ...]
    """The devices that can be asked now, in client order, with their current speeds and bandwidths."""
    pool: Pool
    clock: float = 0.0
    """Simulated seconds at the beginning of the round, including those without an available client."""
    over_provision: float = 1.0
    """The number of clients asked over the number of updates merged."""
    slots: int | None = None
    """The most clients that can be asked now, while others are still training; None: any number."""
    samples: tuple[int, ...] = ()
    """The number of training samples of each client; empty if unknown."""
    draws: tuple[int, ...] = ()
    """The number of samples that each client trains on in a round, with repeats; empty if unknown."""


@dataclass(frozen=True)
class WorkOrder:
    """An assignment: what one client is asked to do in a round.

    Attributes:
        level: Index of the pool model that is sent, or whose size the sent model has.
        hints: Small JSON for the algorithm's own `task`.
        memory: Tensors that a client receives besides the weights. Those of the server (FedDyn's gradients, SCAFFOLD's
            variate) have the parameters' names. The client's own state is named `state/<name>`, and the engine adds it.
            They count as traffic.
        codecs: Those of the algorithm's `plan`, else those of the level or the run, which the engine fills in.
        encoded: The tensors that are sent if the way down is coded. `payload` is then what a client decodes from them.
        evaluates: The client only evaluates `payload`, on samples that it holds out from training.
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

    @property
    def travels(self) -> Params:
        """The tensors that are sent."""
        return self.payload if self.encoded is None else self.encoded


@dataclass(frozen=True)
class RoundPlan:
    round: int
    orders: tuple[WorkOrder, ...]
    wanted: int | None = None
    """The most updates to merge if more clients are asked; None: all."""
    adopted: int = 0
    """How many updates of this round already existed when the coordinator restarted."""
    noise_seed: bytes | None = None
    """For private aggregation (`privacy`): 256 bits from the run's key."""
    evaluates: bool = False
    """All assignments only evaluate (`WorkOrder.evaluates`)."""

    @property
    def label(self) -> str:
        """The round's name in the store: `12`, or `12e` for its evaluation."""
        return f"{self.round}e" if self.evaluates else f"{self.round}"

    @property
    def enough(self) -> int:
        """The most updates that the round takes."""
        return len(self.orders) if self.wanted is None else self.wanted

    @cached_property
    def order_of(self) -> dict[int, WorkOrder]:
        """The assignments by client."""
        return {order.client: order for order in self.orders}


@dataclass(frozen=True)
class ClientUpdate:
    """A client's result: the sub-model that it trained.

    Attributes:
        payload: Tensors on the CPU. An absent name was not trained. Empty if the assignment only evaluates.
        num_examples: The client's sample count |d|, or the number of samples held out in an evaluation.
        metrics: Floats such as `loss` and `seconds`, or those of `clients.evaluation_bounds` in an evaluation.
        level: Set by the server: index of the pool model that was trained, None if it is not in the pool.
        elapsed: Set by the server: seconds of the assignment on the simulated clock.
        state: The client's state (`contracts.KeepsClientState`), which the engine removes before the merge.
        encoded: The tensors that are sent if the way up is coded. On the server `payload` is decoded from them.
        seconds_decode: Set by the server: real seconds of decoding.
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
        """The tensors that are sent."""
        return self.payload if self.encoded is None else self.encoded


Stage = Literal["drop", "prune", "train", "evaluate", "pod", "validate", "straggle", "quorum"]
"""Where a client failed: it dropped out, had too little memory, could not train or evaluate, or lost its pod; or its
update failed validation, came too late, or was one of too few."""

Code = Literal[
    "file", "schema", "order", "signature", "spec", "checksum", "names", "dtype", "shape", "encoding", "finite",
    "statistics", "examples", "metrics", "norm", "unreadable",
]  # fmt: skip
"""Why an update failed validation (`exchange.updates`). `finite` is also the code of training that diverged."""


@dataclass(frozen=True)
class ClientFailure:
    """A client without an update, or with a refused one. `reason` is a text for people. The stage `validate`, and
    training that diverged, have a `code`. The server sets `elapsed` if an update came: seconds of the assignment on
    the simulated clock."""

    round: int
    client: int
    stage: Stage
    reason: str
    code: Code | None = None
    elapsed: float = 0.0


Outcome = ClientUpdate | ClientFailure

R = TypeVar("R", ClientUpdate, ClientFailure, LocalTask)


def changed(record: R, **fields: Any) -> R:
    """Do the same as `dataclasses.replace`, ten times as fast."""
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **fields)
    return new


@dataclass(frozen=True)
class TaskContext:
    """What a client knows when it turns an assignment into a task."""

    layout: ParamLayout
    pool: Pool
    device: Device
    observed: float
    """Free memory now, in % of the full model's parameters (`devices.observe`)."""

"""What can be plugged in: the protocols between the engine's parts.

A network, an algorithm, a selection, a server optimiser, a backend and a tracker are any objects with these methods.
What passes between them are the values of `core.types` (a codec is one of them: orders name theirs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch import Tensor, nn

from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.core.types import (
    FULL,
    ClientUpdate,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pick,
    Pool,
    Prepared,
    Prunable,
    RoundContext,
    RoundPlan,
    Start,
    SubmodelSpec,
    Tables,
    TaskContext,
    WorkOrder,
)


class ModelFamily(Protocol):
    """A network and all its sub-networks. Implementations are frozen dataclasses whose fields are the options, and the
    first two of these: they follow from the data."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; (C, H, W) of an image."""

    @property
    def outputs(self) -> int:
        """The head's size, as the task says."""

    def __hash__(self) -> int: ...

    def layout(self) -> ParamLayout: ...

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """The sub-network, freshly initialised (or without storage under `torch.device("meta")`)."""

    def prunable(self) -> tuple[Prunable, ...]:
        """The layers whose width may shrink, in network order; the head's output is never one."""


@runtime_checkable
class TakesImages(Protocol):
    """A network that no smaller image fits into."""

    min_hw: ClassVar[int]
    """The smallest image side that the architecture can take."""


@runtime_checkable
class TakesTokens(Protocol):
    """A network whose samples are integers, tokens 0 .. vocabulary - 1."""

    @property
    def vocabulary(self) -> int: ...


@runtime_checkable
class GivesWeights(Protocol):
    """A network that comes with weights of its own, which a run starts from."""

    def weights(self) -> Params:
        """The weights of the whole network, as in its state; empty: it has none, and the run starts from fresh ones."""


@runtime_checkable
class PublishedFor(Protocol):
    """A network published for one data set: its sample shape and outputs, the default where none is asked for."""

    published_input: ClassVar[tuple[int, ...]]
    published_outputs: ClassVar[int]


@runtime_checkable
class Nested(Protocol):
    """A network that was published with sub-networks of its own."""

    def nested(self) -> Mapping[str, SubmodelSpec]:
        """All of them by name, in ascending order of their parameters; `small`, `medium` and `large` are among them,
        each a part of the next."""


@runtime_checkable
class CountsMacs(Protocol):
    """A layer with weights that counts its own multiply-adds, inner layers included."""

    def macs(self, given: Tensor, output: Tensor) -> int:
        """Multiply-adds of a forward pass from this input to this output."""


class ServerContext(Protocol):
    """The server's data and training, for algorithms that do more there than average: fine-tune, distil, search."""

    @property
    def samples(self) -> Mapping[int, int]:
        """How many training samples each client holds. With partition.rule=local the server does not know: it is empty,
        or raises PartitionError where a client is asked for."""

    @property
    def data(self) -> Data:
        """The server's own samples (the proxy): they are both the training and the test samples of this data set.
        Raises ConfigError where the server holds none."""

    def train(self, task: LocalTask, params: Params, anchor: Params | None = None) -> Params:
        """The weights after training these (of `task.spec`) on the server's data. The proximal term, where the task has
        one, pulls to `anchor` (None: to `params`). float32, on the CPU. A function of its arguments, whatever the order
        of the names. Raises ConfigError where the server has no data, Diverged where training diverges."""

    def evaluate(self, spec: SubmodelSpec, params: Params) -> float:
        """The task's first metric of this sub-model on the server's data: an accuracy is in [0, 1]; NaN where these
        samples do not define it. Raises ConfigError where the server has no data."""


class PreparationContext(ServerContext, Protocol):
    """The server during a preparation. Part of its data is held out: `train` (and `data.train_x`) uses 80 % of the
    proxy, `evaluate` (and `data.test_x`) the other 20 %."""

    @property
    def seed(self) -> int:
        """Every random choice follows from it (`core.seeds`)."""

    @property
    def device(self) -> str:
        """Where `train` and `evaluate` compute."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """By dotted name, as in JSON: the parameters of `pretrain` and those that the preparation asks for. It sees no
        others, because its result is kept as long as these are the same."""

    @property
    def reference(self) -> PreparationContext | None:
        """Where `pretrain.reference` is true a server that holds all training data, for studies; else None."""


class Preparation(Protocol):
    """A computation that an algorithm needs once, before round one. A frozen dataclass without options: its
    parameters are those of the configuration that `settings` names."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Parameters that it depends on, besides those of `pretrain`: `algorithm.widths`, `fleet.tiers`, ..."""

    @property
    def needs_data(self) -> bool:
        """Whether it needs data on the server: a run that leaves it none is then refused before anything trains."""

    @property
    def artifact(self) -> Any:
        """The type of what it makes, a dataclass or a pydantic model that JSON can hold: `<name>.json`. With a field
        `weights` it gives the run's first weights too (`preparation.weights`); at most one of an algorithm's does."""

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Any:
        """The result, an `artifact`: a function of the network and of what `server` gives."""

    def assumed(self, family: ModelFamily) -> Any:
        """The `artifact` that `flexfleet check` uses instead, before anything is computed."""


class Algorithm(Protocol):
    """A federated algorithm: a frozen dataclass of hyper-parameters with five functions.

    `S`, its state, is a frozen dataclass with at least `params`; state goes in, new state comes out. Where levels
    have weights of their own, `S.published` (Params) adds them as `<level>/<name>` (see `evaluation.weights_of`).
    One that changes the network (early exits) is a `ChoosesNetwork` too.
    """

    @property
    def preparations(self) -> tuple[str, ...]:
        """What has to be computed before `pool`: names of registered preparations, or package.module:NAME."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """The sub-models, smallest first, with names that differ; the largest is reported (`core.pool.pool_of`).
        `prepared`: the result of each of `preparations`, by its name. Raises PoolError for options that make none."""

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> Any:
        """The state before the first round. `params`: the full network's first weights, named and shaped as in
        `layout`; `fleet`: a device for each client, in client order. Raises ConfigError for options that do not go with
        the fleet, the pool or the server."""

    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        """Pure: the same state and context give the same orders, before and after a crash."""

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        """Pure, on the client: the sub-model that it really trains, the loss, the optimiser. Raises ClientError where
        what was sent does not fit `ctx.observed` (in % of the full model): the client then fails at stage `prune`."""

    def merge(self, state: Any, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext) -> Any:
        """The state after the round: of the same class, with the same constant fields; its weights keep names, types
        and shapes, and are finite (`rounds.checks` raises ModelError or Diverged). `answers` has all answers in client
        order, and may be read several times; a reading fetches one update at a time, on the CPU, whose payload has the
        shapes of its `spec`."""


@runtime_checkable
class ChoosesNetwork(Protocol):
    def network(self, family: ModelFamily) -> ModelFamily:
        """The network that this algorithm trains where `family` is configured."""


class ClientContext(Protocol):
    """A client that has trained, as a method's measurements see it. The tensors are copies, on the torch device that
    trained: changing them changes no update."""

    @property
    def goal(self) -> Task:
        """The task of the data, which owns the loss."""

    @property
    def family(self) -> ModelFamily: ...

    @property
    def order(self) -> WorkOrder: ...

    @property
    def task(self) -> LocalTask:
        """The task that follows from the order; `task.spec` is the sub-model that was trained."""

    @property
    def received(self) -> Params:
        """The weights of `task.spec` as they were sent."""

    @property
    def trained(self) -> Params:
        """The weights of `task.spec` after training."""

    @property
    def x(self) -> Tensor:
        """(N, ...): the client's samples, normalised."""

    @property
    def y(self) -> Tensor:
        """(N, ...): their targets."""

    @property
    def losses(self) -> Tensor:
        """float32 (N,): the loss of each sample with the received weights, in evaluation mode, at the last exit. In
        a level with `static_bn` batch norm takes the batch's statistics instead of the stored ones. Computed when it is
        asked for."""


@dataclass(frozen=True)
class ClientMetric:
    """A figure that a method has its clients report besides the engine's own: in `ClientUpdate.metrics`, and in each
    client's line of the history.

    `measure` runs on the client after training, on copies: it changes no update. Its value has to be finite and between
    `low` and `high`, or the client fails. A client that lies can report any number between the two, and none beyond.
    The name is a plain identifier that the engine does not use (`core.clients`).
    """

    name: str
    low: float
    high: float
    measure: Callable[[ClientContext], float]


@runtime_checkable
class MeasuresClients(Protocol):
    """An algorithm, or a selection, that wants more of its clients than the engine's figures."""

    def client_metrics(self) -> Sequence[ClientMetric]: ...


@runtime_checkable
class KeepsClientState(Protocol):
    """An algorithm whose clients keep something from one round that they take part in to the next: a head of their own
    (FedPer), a variate (SCAFFOLD).

    The engine carries this state: to the client with its order, back with its update, and into the store with the
    round's commit. A state that comes with a refused update is dropped. `merge` never sees a state. The server stores
    it unencrypted, so whoever can read the store can read it.
    """

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the state, float32, the same for all clients. Where a name is that of a parameter, the
        client keeps this parameter to itself: its updates do not contain it."""

    def begin(self, state: Params, start: Start, order: WorkOrder, task: LocalTask, ctx: TaskContext) -> Start:
        """Pure, on the client: what training starts from. `start`: what it would start from without a state, the
        received weights. `state` is empty for a client that has not taken part yet, or whose state was lost."""

    def keep(self, state: Params, client: ClientContext) -> Params:
        """Pure, on the client after training: all that `client_state` names. `state` as in `begin`, on the torch device
        that has trained, as are the weights of `client`."""


@runtime_checkable
class RemembersChanges(Protocol):
    """An algorithm whose server remembers how far each client moved the weights that it was sent (FedDyn). Asynchronous
    rounds cannot serve it: they move a late update to the current weights (`rounds.buffer`)."""

    @property
    def remembers_changes(self) -> bool:
        """Whether it does with these options."""


_known: dict[type, tuple[bool, bool]] = {}
"""By class, whether it measures clients, and whether its clients keep a state."""


def _has(kind: type) -> tuple[bool, bool]:
    if kind not in _known:
        _known[kind] = issubclass(kind, MeasuresClients), issubclass(kind, KeepsClientState)
    return _known[kind]


def measures_clients(method: object) -> TypeGuard[MeasuresClients]:
    """`isinstance`, remembered by class: for a protocol it takes 10 us, and each client of a round asks."""
    return _has(type(method))[0]


def keeps_client_state(algorithm: object) -> TypeGuard[KeepsClientState]:
    """`isinstance`, remembered by class as above."""
    return _has(type(algorithm))[1]


class Selector(Protocol):
    """Which clients take part, and which pool model each is sent. A frozen dataclass; what it learns lies in tables,
    part of the algorithm's state."""

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        """The tables before the first round."""

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        """At most `count` distinct available clients, in client order: (client, level), where a level is an index of
        `context.pool`. All that is random comes from `rng`."""

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        """Called after each order, in client order, for failures too: a client that never answers must not be asked
        more often than one that does. `seconds`: the order's time on the simulated clock, also of an update that was
        not taken; 0 if none came, or if there is no such clock."""


class ServerOptimizer(Protocol):
    """How the global model moves towards the clients' mean. A frozen dataclass; its moments are part of the state."""

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        """(new moments, new parameters). `trained` marks the elements that some client trained (bool, same shapes);
        the others keep their value. Empty `moments` are those before the first round."""


class Terms(Protocol):
    """The part of the section `rounds` of a configuration that decides which updates a round accepts."""

    @property
    def bound(self) -> float | None:
        """`rounds.norm_bound`; None if it is off."""

    @property
    def deadline_s(self) -> float | None: ...
    @property
    def over_provision(self) -> float: ...
    @property
    def quorum(self) -> float: ...


class Backend(Protocol):
    """Carries out plans: one outcome for each order, as clients finish, in any order."""

    @property
    def durable(self) -> bool:
        """Whether an update is in the run's store when `run` yields it."""

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]: ...


class Watcher(Protocol):
    """Looks on while a run computes, and may end it. What it is given is the run's own: it must not change it."""

    def update(self, order: WorkOrder, update: ClientUpdate) -> None:
        """An update has arrived and was decoded; whether it is merged is decided later. In the order of arrival, which
        depends on the backend."""

    def round(
        self, number: int, metrics: Mapping[str, float], clients: Sequence[Mapping[str, Any]], state: Any
    ) -> bool:
        """Round `number`, counted from 1, is computed and evaluated, and not committed yet; after a kill it is computed
        again. `clients` has a line for each that was asked, `state` is the algorithm's. True: the run stops after
        committing it."""


class Tracker(Protocol):
    """Receives what a run measures. `step` is the round, counted from 1. A class that has it as its base writes only
    the methods that it has a use for."""

    def params(self, values: Mapping[str, Any]) -> None:
        return None

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        return None

    def finish(self, status: str) -> None:
        return None


@dataclass(frozen=True)
class Interval:
    """The values that a search draws of one hyper-parameter: from `low` to `high`, or one of `choices`. The configured
    value is among them, so that the search learns from its first trial, which runs the configuration unchanged."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """As likely between 1 and 10 as between 10 and 100."""
    whole: bool = False
    """Whole numbers only, low and high too."""
    start: float | None = None
    """The value that the algorithm computes by itself if its field is null."""
    choices: tuple[Any, ...] = ()
    """The values of a parameter of a closed set; they stand alone."""


def around(value: float, low: float, high: float, *, log: bool = False) -> Interval:
    """From `low` to `high`, or to the configured value where that lies beyond."""
    return Interval(min(low, value), max(high, value), log=log)


@runtime_checkable
class Searched(Protocol):
    """An algorithm that has a search space of its own."""

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """By the path of a field: `kd_weight`, or `gammas.0` for the first entry of a list. `pool` is that of the
        algorithm as it is configured. A parameter that is switched off there is left out: a search that drew values
        for it would switch it on."""

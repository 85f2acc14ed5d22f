"""What can be plugged in: the protocols between the engine's parts.

A network, an algorithm, a selection, a server optimizer, a backend and a tracker are any objects with these methods.
The values that pass between them are in `core.types`, which also has the protocol of a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

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


# --------------------------------------------------------------------------------------------------- networks
class ModelFamily(Protocol):
    """A network and all its sub-networks: a frozen dataclass of options. The two properties follow from the data."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, (C, H, W) for an image."""

    @property
    def outputs(self) -> int:
        """The size of the head, `Task.outputs`."""

    def __hash__(self) -> int: ...

    def layout(self) -> ParamLayout: ...

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """Return the sub-network, freshly initialised, or without storage under `torch.device("meta")`."""

    def prunable(self) -> tuple[Prunable, ...]:
        """Return the layers whose width may shrink, in network order, without the head."""


@runtime_checkable
class TakesImages(Protocol):
    """A network with a minimal image size."""

    min_hw: ClassVar[int]
    """The smallest image side that the architecture accepts."""


@runtime_checkable
class TakesTokens(Protocol):
    """A network whose samples are integers, tokens 0 .. vocabulary - 1."""

    @property
    def vocabulary(self) -> int: ...


@runtime_checkable
class GivesWeights(Protocol):
    """A network with pretrained weights, from which a run starts."""

    def weights(self) -> Params:
        """Return the state of the whole network, or an empty dict to start from fresh weights."""


@runtime_checkable
class PublishedFor(Protocol):
    """A network published for one data set, whose sample shape and outputs are the defaults."""

    published_input: ClassVar[tuple[int, ...]]
    published_outputs: ClassVar[int]


@runtime_checkable
class Nested(Protocol):
    """A network that was published with sub-networks of its own."""

    def nested(self) -> Mapping[str, SubmodelSpec]:
        """Return the sub-networks by name, in ascending order of their parameters. `small`, `medium` and `large` are
        among them, each contained in the next."""


@runtime_checkable
class CountsMacs(Protocol):
    """A layer with weights that counts its own multiply-adds, including inner layers."""

    def macs(self, given: Tensor, output: Tensor) -> int:
        """Return the multiply-adds of a forward pass with this input and output."""


# ------------------------------------------------------------------------------------------------- the server
class ServerContext(Protocol):
    """The server's data and training, for algorithms that fine-tune, distil or search on the server."""

    @property
    def samples(self) -> Mapping[int, int]:
        """The number of training samples of each client. Unknown with partition.rule=local: then empty, or raises
        PartitionError for a client."""

    @property
    def data(self) -> Data:
        """The server's samples (the proxy), as both training and test samples. Raises ConfigError if there are none."""

    def train(self, task: LocalTask, params: Params, anchor: Params | None = None) -> Params:
        """Train `params` (of `task.spec`) on the server's data and return float32 weights on the CPU.

        The proximal term, if the task has one, pulls to `anchor` (None: to `params`). Pure; the order of names does
        not matter. Raises ConfigError without data, Diverged if training diverges.
        """

    def evaluate(self, spec: SubmodelSpec, params: Params) -> float:
        """Return the task's first metric on the server's data (an accuracy is in [0, 1]), or NaN if the samples do not
        define it. Raises ConfigError without data."""


class PreparationContext(ServerContext, Protocol):
    """The server during a preparation. `train` and `data.train_x` use 80 % of the proxy, `evaluate` and `data.test_x`
    the other 20 %."""

    @property
    def seed(self) -> int:
        """The seed of every random choice (`core.seeds`)."""

    @property
    def device(self) -> str:
        """The torch device of `train` and `evaluate`."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parameters of `pretrain` and those that the preparation names, by dotted name, as in JSON. The result is
        cached as long as these are equal."""

    @property
    def reference(self) -> PreparationContext | None:
        """With `pretrain.reference`, a server that holds all training data, for studies; else None."""


class Preparation(Protocol):
    """A computation that an algorithm needs once, before round one. A frozen dataclass without options."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Parameters that it depends on besides `pretrain`: `algorithm.widths`, `fleet.tiers`, ..."""

    @property
    def needs_data(self) -> bool:
        """Whether it needs data on the server. A run without them is refused before anything trains."""

    @property
    def artifact(self) -> Any:
        """The type of the result, a dataclass or a pydantic model, stored as `<name>.json`. A field `weights` provides
        the run's first weights (`preparation.weights`); only one preparation of an algorithm may have it."""

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Any:
        """Return the `artifact`, a function of the network and of what `server` provides."""

    def assumed(self, family: ModelFamily) -> Any:
        """Return the `artifact` that `flexfleet check` assumes before anything is computed."""


# ------------------------------------------------------------------------------------------------- algorithms
class Algorithm(Protocol):
    """A federated algorithm: a frozen dataclass of hyper-parameters with five functions.

    Its state is a frozen dataclass with at least `params`. If levels have weights of their own, the state's
    `published` (Params) adds them as `<level>/<name>` (see `evaluation.weights_of`).
    """

    @property
    def preparations(self) -> tuple[str, ...]:
        """Computations needed before `pool`: names of registered preparations, or package.module:NAME."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return the sub-models, smallest first, with distinct names; the largest is reported (`core.pool.pool_of`).
        `prepared` maps each of `preparations` to its result. Raises PoolError for impossible options."""

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> Any:
        """Return the state before the first round.

        Args:
            params: The first weights of the full network, as in `layout`.
            layout: The network's layout.
            fleet: A device for each client, in client order.
            pool: The sub-models.
            server: The server's data and training.

        Raises:
            ConfigError: The options do not go with the fleet, the pool or the server.
        """

    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        """Return the assignments of a round. Pure: equal before and after a crash."""

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        """Return the sub-model, loss and optimizer of a client. Pure, called on the client. Raises ClientError if the
        model does not fit into `ctx.observed` (in % of the full model); the client then fails at stage `prune`."""

    def merge(self, state: Any, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext) -> Any:
        """Return the state after a round, with the same constant fields and finite weights of the same names, types and
        shapes (`rounds.checks`). `answers` are all results in client order and can be read several times. Reading
        fetches one update at a time, on the CPU."""


@runtime_checkable
class ChoosesNetwork(Protocol):
    """An algorithm that changes the network, for example by early exits."""

    def network(self, family: ModelFamily) -> ModelFamily:
        """Return the network to train if `family` is configured."""


@runtime_checkable
class RemembersChanges(Protocol):
    """An algorithm whose server remembers each client's change of the weights (FedDyn). It cannot run with asynchronous
    rounds, which apply a late update to the current weights (`rounds.buffer`)."""

    @property
    def remembers_changes(self) -> bool:
        """Whether it does with these options."""


@dataclass(frozen=True)
class Interval:
    """The values of one hyper-parameter that a search draws: from `low` to `high`, or one of `choices`. The configured
    value must be among them, because the first trial runs it."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Draw on a logarithmic scale."""
    whole: bool = False
    """Draw whole numbers."""
    start: float | None = None
    """The value that the algorithm computes if its field is null."""
    choices: tuple[Any, ...] = ()
    """The values of a categorical parameter, without the other fields."""


def around(value: float, low: float, high: float, *, log: bool = False) -> Interval:
    """Return the interval from `low` to `high`, extended to the configured value."""
    return Interval(min(low, value), max(high, value), log=log)


@runtime_checkable
class Searched(Protocol):
    """An algorithm with a default search space."""

    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """Return intervals by path: `kd_weight`, or `gammas.0` for the first entry of a list. `pool` is that of the
        configured algorithm. Omit a parameter that is switched off, because drawing a value would switch it on."""


# --------------------------------------------------------------------------------------------- on the clients
class ClientContext(Protocol):
    """A client after training, for an algorithm's measurements. The tensors are copies on the torch device that
    trained, so changing them changes no update."""

    @property
    def goal(self) -> Task:
        """The task of the data, which owns the loss."""

    @property
    def family(self) -> ModelFamily: ...

    @property
    def order(self) -> WorkOrder: ...

    @property
    def task(self) -> LocalTask:
        """The task of the assignment; `task.spec` is the sub-model that was trained."""

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
        """float32 (N,): the loss of each sample with the received weights, in evaluation mode, at the last exit. With
        `static_bn` batch norm uses the batch's statistics. Computed on access."""


@dataclass(frozen=True)
class ClientMetric:
    """A metric that an algorithm has its clients report in `ClientUpdate.metrics`, besides the engine's own.

    `measure` runs on the client after training and changes no update. Its value must be finite and between `low` and
    `high`, or the client fails, so a lying client can report any number between the two and none beyond. The name is
    an identifier that the engine does not use (`core.clients`).
    """

    name: str
    low: float
    high: float
    measure: Callable[[ClientContext], float]


@runtime_checkable
class MeasuresClients(Protocol):
    """An algorithm, or a selection, with metrics of its own."""

    def client_metrics(self) -> Sequence[ClientMetric]: ...


@runtime_checkable
class KeepsClientState(Protocol):
    """An algorithm whose clients keep a state from one round to the next: a head of their own (FedPer), or a variate
    (SCAFFOLD).

    The state travels to the client with its assignment, back with its update, and into the store with the round's
    commit. The state of a refused update is dropped, and `merge` never sees a state. The server stores it unencrypted.
    """

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of the state, float32, equal for all clients. A parameter with such a name stays with
        the client: updates do not contain it."""

    def begin(self, state: Params, start: Start, order: WorkOrder, task: LocalTask, ctx: TaskContext) -> Start:
        """Return what training starts from. Pure, on the client. `start` holds the received weights. `state` is empty
        for a client without a state."""

    def keep(self, state: Params, client: ClientContext) -> Params:
        """Return the new state, with all names of `client_state`. Pure, on the client after training, on the torch
        device that trained. `state` as in `begin`."""


# ----------------------------------------------------------------------------------------------------- rounds
class Selector(Protocol):
    """Selects the clients of a round and the pool model of each. A frozen dataclass. What it learns is stored in
    tables, which are part of the algorithm's state."""

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        """Return the tables before the first round."""

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        """Return (client, level) for at most `count` distinct available clients, in client order. A level is an index
        of `context.pool`. All randomness comes from `rng`."""

    def learn(self, state: Tables, order: WorkOrder, outcome: Outcome, seconds: float) -> Tables:
        """Return the tables after one result, also of a failure: a client that never answers must not be asked more
        often than others. Called in client order. `seconds` is the assignment's time on the simulated clock, also if
        the update was not merged; 0 without an update or a clock."""


class ServerOptimizer(Protocol):
    """Moves the global model towards the clients' mean. A frozen dataclass; its moments are part of the state."""

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        """Return (new moments, new parameters). `trained` (bool, same shapes) marks the elements that a client trained;
        the others keep their value. `moments` are empty before the first round."""


class Backend(Protocol):
    """Executes plans and yields one result for each assignment, in any order."""

    @property
    def durable(self) -> bool:
        """Whether an update is in the run's store when `run` yields it."""

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]: ...


class Watcher(Protocol):
    """Observes a run and may end it. Its arguments belong to the run and must not be changed."""

    def update(self, order: WorkOrder, update: ClientUpdate) -> None:
        """Called when an update has arrived and was decoded, before it is accepted. The order depends on the
        backend."""

    def round(
        self, number: int, metrics: Mapping[str, float], clients: Sequence[Mapping[str, Any]], state: Any
    ) -> bool:
        """Called when a round (from 1) is evaluated but not committed; after a kill it is computed again. `clients` has
        a line for each client that was asked, `state` is the algorithm's. Return True to stop after the commit."""


class Tracker(Protocol):
    """Receives a run's measurements. `step` is the round, counted from 1. Subclasses override only what they need."""

    def params(self, values: Mapping[str, Any]) -> None:
        return None

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        return None

    def finish(self, status: str) -> None:
        return None

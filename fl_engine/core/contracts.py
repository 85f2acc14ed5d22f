"""Protocols of the replaceable parts of the engine.

Any object with the methods of a protocol can serve as a network, algorithm, selection, server optimizer, backend or
tracker. `core.types` defines the values that these objects exchange, and the protocol of a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.core.types import (
    FULL,
    Assignment,
    ClientResult,
    ClientUpdate,
    Device,
    LocalTask,
    ParamLayout,
    Params,
    Pick,
    Pool,
    Prepared,
    Prunable,
    Results,
    RoundContext,
    RoundPlan,
    Start,
    SubmodelSpec,
    Tables,
    TaskContext,
)


# --------------------------------------------------------------------------------------------------- networks
class ModelFamily(Protocol):
    """A network with sub-networks, implemented as a frozen dataclass of options."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, such as (C, H, W) for an image."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the head, equal to `Task.outputs`."""

    def __hash__(self) -> int: ...

    def layout(self) -> ParamLayout: ...

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """Create the sub-network with random weights. Under `torch.device("meta")`, the weights have no storage."""

    def prunable(self) -> tuple[Prunable, ...]:
        """Return the layers with a variable width, except the head, in network order."""


@runtime_checkable
class TakesTokens(Protocol):
    """A network whose samples are integer tokens from 0 to vocabulary - 1."""

    @property
    def vocabulary(self) -> int: ...


@runtime_checkable
class GivesWeights(Protocol):
    def weights(self) -> Params:
        """Return pretrained weights of the whole network, or an empty dict if training starts from random weights."""


@runtime_checkable
class PublishedFor(Protocol):
    """A network that was published for one data set. This data set defines the default sample shape and outputs."""

    published_input: ClassVar[tuple[int, ...]]
    published_outputs: ClassVar[int]


@runtime_checkable
class Nested(Protocol):
    def nested(self) -> Mapping[str, SubmodelSpec]:
        """Map names to published sub-networks, from the smallest to the largest. `small`, `medium` and `large` must be
        among the names, and each sub-network contains the previous one."""


@runtime_checkable
class CountsMacs(Protocol):
    def macs(self, given: Tensor, output: Tensor) -> int:
        """Return the number of multiply-adds of this layer and its inner layers for this input and output."""


# ------------------------------------------------------------------------------------------------- the server
class ServerContext(Protocol):
    """Access to the server's data and to training on the server, for fine-tuning, distillation and search."""

    @property
    def samples(self) -> Mapping[int, int]:
        """Map each client to its number of training samples. Raises PartitionError if partition.rule=local."""

    @property
    def data(self) -> Data:
        """The server's data set (the proxy set), which uses the same samples for training and testing. Raises
        ConfigError if the server does not have data."""

    def train(self, task: LocalTask, params: Params) -> Params:
        """Train `params`, the weights of `task.spec` in any order, on the server. Return float32 CPU weights.

        This method is pure. Raises ConfigError if the server does not have data, and Diverged if training diverges.
        """

    def train_on_sample(self, task: LocalTask, params: Params, most: int) -> Params:
        """Like `train`, but use at most `most` samples, which are the same in each call. A repeated call returns the
        stored result, until a call with another `task.seed`."""

    def evaluate(self, spec: SubmodelSpec, params: Params) -> float:
        """Return the task's first metric on the server's data; NaN if the metric is undefined for this data."""

    def loss(self, spec: SubmodelSpec, params: Params, most: int) -> float:
        """Return the mean loss on at most `most` samples of the server, which are the same in each call."""


class PreparationContext(ServerContext, Protocol):
    """Access to data and training on the server during a preparation. `train` and `data.train_x` use 80 % of the proxy
    set, and `evaluate` and `data.test_x` use the remaining 20 %."""

    @property
    def seed(self) -> int:
        """Seed of all random choices (`core.seeds`)."""

    @property
    def device(self) -> str:
        """Torch device on which `train` and `evaluate` run."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Map the dotted names of parameters to JSON values. The parameters are `pretrain.*` and the `settings` of the
        preparation. A cached result is reused if none of these values has changed."""

    @property
    def reference(self) -> PreparationContext | None:
        """Context of a server that has all training data, for comparisons; None unless `pretrain.reference` is set."""


class Preparation(Protocol):
    """Computation that runs once before the first round, implemented as a frozen dataclass without options."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Parameters besides `pretrain` that determine the result, such as `algorithm.widths` or `fleet.tiers`."""

    @property
    def needs_data(self) -> bool:
        """True if the preparation requires data on the server. A run without server data then fails before training
        starts."""

    @property
    def artifact(self) -> Any:
        """Type of the result: a dataclass or a pydantic model. The result is stored as `<name>.json`. A field `weights`
        of the result contains the initial weights (`preparation.weights`). At most one preparation per algorithm may
        have `weights`."""

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Any:
        """Compute the result, an `artifact`. The result may depend only on the network and on `server`."""

    def assumed(self, family: ModelFamily) -> Any:
        """Return the result that `flexfleet check` assumes, because this command does not run the preparation."""


# ------------------------------------------------------------------------------------------------- algorithms
class Algorithm(Protocol):
    """A federated algorithm, implemented as a frozen dataclass of hyper-parameters with five methods.

    The algorithm's state is a frozen dataclass with at least the field `params`. If each level has separate weights,
    the field `published` (Params) contains the weights as `<level>/<name>` (see `evaluation.weights_of`).
    """

    @property
    def preparations(self) -> tuple[str, ...]:
        """Preparations that run before `pool`, as registered names or package.module:NAME."""

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        """Return the sub-models in ascending order of size, with distinct names. The largest sub-model has
        `reported=True` (see `core.pool.pool_of`). `prepared` maps each preparation to its result. Raises PoolError for
        invalid options."""

    def init(
        self, params: Params, layout: ParamLayout, fleet: Sequence[Device], pool: Pool, server: ServerContext
    ) -> Any:
        """Return the state before the first round.

        Args:
            params: Initial weights of the full network, in the order of `layout`.
            layout: The network's layout.
            fleet: The devices of all clients, in client order.
            pool: The sub-models.
            server: The server's data and training.

        Raises:
            ConfigError: if the options are incompatible with the fleet, the pool or the server.
        """

    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        """Return the assignments of a round. The method must be pure, because a resumed run must get the same plan."""

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        """Return a client's sub-model, loss and optimizer. The method is pure and runs on the client. Raises
        ClientError if the model does not fit into `ctx.observed` (in % of the full model). The client then fails at
        stage `prune`."""

    def merge(self, state: Any, plan: RoundPlan, results: Results, server: ServerContext) -> Any:
        """Return the state after a round. Constant fields must not change. Weights must be finite, and their names,
        types and shapes must not change (`rounds.checks`). `results` contains all results in client order and can be
        iterated several times. Each iteration step loads one update into the CPU's memory."""


@runtime_checkable
class ChoosesNetwork(Protocol):
    def network(self, family: ModelFamily) -> ModelFamily:
        """Return the network to train instead of the configured `family`, for example a network with early exits."""


@runtime_checkable
class RemembersChanges(Protocol):
    @property
    def remembers_changes(self) -> bool:
        """True if the server stores the weight change of each client (FedDyn). Asynchronous rounds do not support such
        algorithms, because they apply late updates to newer weights."""


@dataclass(frozen=True)
class Interval:
    """Search space of one hyper-parameter: values from `low` to `high`, or one of `choices`. The space must contain the
    configured value, because the first trial uses this value."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """If true, sample on a logarithmic scale."""
    whole: bool = False
    """If true, sample only integers."""
    start: float | None = None
    """Value that the algorithm computes and uses if the configured value is null."""
    choices: tuple[Any, ...] = ()
    """Values of a categorical parameter. If `choices` is not empty, all other fields are unused."""


def around(value: float, low: float, high: float, *, log: bool = False) -> Interval:
    """Return the interval from `low` to `high`, extended to include `value`."""
    return Interval(min(low, value), max(high, value), log=log)


@runtime_checkable
class Searched(Protocol):
    def search_space(self, pool: Pool) -> Mapping[str, Interval]:
        """Map each parameter path, such as `kd_weight` or `gammas.0` (first entry of a list), to its interval. `pool`
        is the configured algorithm's pool. Omit disabled parameters, because a sampled value would enable them."""


# --------------------------------------------------------------------------------------------- on the clients
@dataclass(frozen=True)
class ClientContext:
    """State of a client after training, from which algorithms compute metrics. The tensors are copies on the training
    device, so a change of a tensor does not affect the update."""

    goal: Task
    """Task of the data set, which defines the loss."""
    family: ModelFamily
    assignment: Assignment
    task: LocalTask
    """Local training task; `task.spec` is the sub-model that the client has trained."""
    received: Params
    """Weights of `task.spec` that the client received."""
    trained: Params
    """Weights of `task.spec` after training."""
    x: Tensor
    """Normalised samples of the client, (N, ...)."""
    y: Tensor
    """Targets of the samples, (N, ...)."""
    measure_losses: Callable[[], Tensor]

    @cached_property
    def losses(self) -> Tensor:
        """Loss of each sample before training, float32 (N,), at the last exit in evaluation mode. Batch norm uses the
        batch's statistics if `static_bn` is true. The losses are computed on first access."""
        return self.measure_losses()


@dataclass(frozen=True)
class ClientMetric:
    """A metric that clients report to an algorithm in `ClientUpdate.metrics`, in addition to the engine's metrics.

    `measure` runs on the client after training and does not change the update. The client fails unless the value is
    finite and between `low` and `high`. A malicious client can report a false value within the bounds. The server
    rejects values outside of the bounds. `name` must be an identifier that the engine does not use (`core.clients`).
    """

    name: str
    low: float
    high: float
    measure: Callable[[ClientContext], float]


@runtime_checkable
class MeasuresClients(Protocol):
    def client_metrics(self) -> Sequence[ClientMetric]:
        """Return the metrics of an algorithm or a selection."""


@runtime_checkable
class KeepsClientState(Protocol):
    """An algorithm whose clients keep a state between rounds, such as a personal head (FedPer) or a control variate
    (SCAFFOLD).

    The server sends the state with the assignment. The client returns the new state with the update. The state of a
    rejected update is discarded. `merge` never receives states. The server stores states unencrypted.
    """

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        """Map the name of each tensor in the state (float32) to a shape. The shapes are the same for all clients.
        Parameters with these names are private to the client, so updates do not contain them."""

    def begin(self, state: Params, start: Start, assignment: Assignment, task: LocalTask, ctx: TaskContext) -> Start:
        """Return the weights and gradient terms at the start of training. The method is pure and runs on the client.
        `start` contains the received weights. `state` is empty if the client does not have a state yet."""

    def keep(self, state: Params, client: ClientContext) -> Params:
        """Return the new state, with all names of `client_state`. The method is pure and runs on the client after
        training, with tensors on the training device. `state` is the state that `begin` received."""


@runtime_checkable
class HasPersonalModels(Protocol):
    """An algorithm with client states that computes the weights of each client's personal model (Ditto)."""

    def personal(self, state: Params, params: Params) -> Params:
        """Return the weights of a client's personal model. The method is pure. `state` is the client's state, and
        `params` are the global weights of the same sub-model."""


# ----------------------------------------------------------------------------------------------------- rounds
class Selector(Protocol):
    """Selects clients for a round, and a pool model for each selected client. A selector is a frozen dataclass. The
    selector's learned values are stored in tables, which are part of the algorithm's state."""

    def init(self, fleet: Sequence[Device], pool: Pool) -> Tables:
        """Return the tables before the first round."""

    def pick(self, state: Tables, context: RoundContext, count: int, rng: np.random.Generator) -> list[Pick]:
        """Return (client, level) pairs for at most `count` distinct available clients, in client order. A level is an
        index into `context.pool`. All random numbers must be drawn from `rng`."""

    def learn(self, state: Tables, assignment: Assignment, result: ClientResult, seconds: float) -> Tables:
        """Return the tables after one result. The engine passes all results of a round in client order. Failures must
        change the tables, so that a client that always fails is not selected more often than others. `seconds` is the
        simulated duration of the assignment, even if the update was not merged; 0 without an update or a clock."""


class ServerOptimizer(Protocol):
    """Updates the global model with the mean of the clients' models. The moments are part of the algorithm's state."""

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        """Compute the new moments and the new parameters. `trained` (bool, same shapes) is true for elements that at
        least one client trained. All other elements must not change. `moments` is empty before the first round."""


class Backend(Protocol):
    """Executes plans and yields one result for each assignment, in any order."""

    @property
    def durable(self) -> bool:
        """True if each update is already in the run's store when `run` yields it."""

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]: ...


class Watcher(Protocol):
    """Observes a run and can stop it. The methods must not modify their arguments."""

    def update(self, assignment: Assignment, update: ClientUpdate) -> None:
        """Handle a decoded update before the server checks it. The order of updates depends on the backend."""

    def round(
        self, number: int, metrics: Mapping[str, float], clients: Sequence[Mapping[str, Any]], state: Any
    ) -> bool:
        """Handle round `number`, counted from 1, before its commit. A resumed run handles an uncommitted round again.
        `clients` has an entry for each client with an assignment. Return True to end the run after the commit."""


class Tracker(Protocol):
    """Logs the measurements of a run. Each row of `metrics` contains a round, counted from 1, and its metrics."""

    def params(self, values: Mapping[str, Any]) -> None:
        return None

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        return None

    def finish(self, status: str) -> None:
        return None

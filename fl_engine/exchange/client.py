"""How a client carries out its assignments, in any process: alone, or side by side with other clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fl_engine.core.clients import LARGEST_LOSS, Shapes, apart, client_metrics, header, kept_by_clients
from fl_engine.core.contracts import Algorithm, ClientMetric, KeepsClientState, ModelFamily
from fl_engine.core.costs import macs_per_sample
from fl_engine.core.errors import ClientError, ModelError, first_line, kind_of, memory_errors
from fl_engine.core.samples import Data
from fl_engine.core.slicing import take
from fl_engine.core.system import at_work
from fl_engine.core.types import (
    HEAD,
    SGD,
    ClientFailure,
    ClientUpdate,
    Code,
    Device,
    LocalTask,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    Start,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)
from fl_engine.data.partition import Partition
from fl_engine.data.partition_rules import Ints
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import Rejected
from fl_engine.exchange.measuring import TrainedClient, evaluated
from fl_engine.exchange.updates import Rules, check_state, received
from fl_engine.fleet import devices
from fl_engine.storage.store import tensor_bytes
from fl_engine.training import local
from fl_engine.training.numerics import SINGLE, Numerics

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Site:
    """What all clients of a run share."""

    family: ModelFamily
    pool: Pool
    fleet: tuple[Device, ...]
    data: Data
    partition: Partition
    seed: int
    numerics: Numerics = SINGLE
    free: float | None = None
    """Measured free memory of the device, in % of the full model's parameters; None: the fleet simulates it."""
    held: tuple[Ints, ...] = ()
    """The samples that each client holds out for evaluation; `partition` has the others. Empty: no client does."""
    most: int | None = None
    """The most samples that a client may report if the server does not know how many it holds (`data.local_data`);
    None: the server knows."""

    def held_by(self, client: int) -> Ints:
        """The samples that a client holds out."""
        return self.held[client] if self.held else np.zeros(0, dtype=np.int64)

    @cached_property
    def layout(self) -> ParamLayout:
        return self.family.layout()

    @cached_property
    def rules(self) -> Rules:
        """The rules for updates of these clients."""
        samples = () if self.most is not None else tuple(len(indices) for indices in self.partition.clients)
        return Rules(
            self.layout,
            samples,
            self.pool,
            self.fleet,
            family=self.family,
            seed=self.seed,
            held=tuple(map(len, self.held)),
            task=self.data.task if self.held else None,
            most=self.most,
        )


@dataclass(frozen=True)
class Work:
    """An assignment that is ready for training. In an evaluation the task has no epochs."""

    order: WorkOrder
    task: LocalTask
    start: Params
    """The weights to start from, after pruning; views where possible."""
    indices: np.ndarray
    """The client's samples; in an evaluation those that it holds out."""
    free: float
    """Free memory in % of the full model's parameters."""
    algorithm: Algorithm
    linear: Params
    """See `Start`."""
    received: Params
    """The weights as they were sent."""
    state: Params
    """What the client has kept since its last assignment."""


def execute(algorithm: Algorithm, order: WorkOrder, site: Site, device: str = "cpu") -> Outcome:
    """Carry out one assignment: observe the free memory, prune, train."""
    work = accept(algorithm, order, site)
    return work if isinstance(work, ClientFailure) else train([work], site, device)[0]


def accept(algorithm: Algorithm, order: WorkOrder, site: Site) -> Work | ClientFailure:
    """Observe the free memory, and prune. Raises ModelError if the algorithm does not return a LocalTask."""
    if order.evaluates:
        task = LocalTask(order.spec, SGD(0.0), epochs=0, batch_size=1, drop_last=False, seed=order.seed)
        return Work(order, task, order.payload, site.held_by(order.client), 0.0, algorithm, {}, order.payload, {})
    layout = site.layout
    free = devices.observe(site.fleet[order.client], site.seed, order.round) if site.free is None else site.free
    context = TaskContext(layout, site.pool, site.fleet[order.client], free)
    try:
        task = algorithm.task(order, context)
        taken = take(order.payload, layout, task.spec, have=order.spec) if isinstance(task, LocalTask) else {}
    except (ClientError, ModelError) as error:
        return ClientFailure(order.round, order.client, "prune", str(error))
    if not isinstance(task, LocalTask):  # a bug that would make all clients fail
        raise ModelError(f"{type(algorithm).__name__}.task must return a LocalTask, got {kind_of(task)}")
    indices = site.partition.clients[order.client]
    if not len(indices):
        return ClientFailure(order.round, order.client, "train", "a client without samples cannot train")
    # Sums over all parameters depend on the parameters' order, which a file does not preserve.
    received = {name: taken[name] for name in layout.slots if name in taken}
    memory, state = apart(order.memory)
    start = Start(received, {name: memory[name] for name in memory if name in received})
    if isinstance(algorithm, KeepsClientState):
        try:
            start = algorithm.begin(state, start, order, task, context)
            if odd := sorted(start.params.keys() ^ received.keys())[:4]:
                raise ModelError(f"{type(algorithm).__name__}.begin must return the sub-model's parameters, got {odd}")
        except (ClientError, ModelError) as error:
            return ClientFailure(order.round, order.client, "train", str(error))
    weights = {name: start.params[name] for name in received}
    return Work(order, task, weights, indices, free, algorithm, start.linear, received, state)


def accept_all(
    algorithm: Algorithm, orders: Iterable[WorkOrder], site: Site
) -> tuple[list[list[Work]], list[ClientFailure]]:
    """Return the groups that train side by side, and the failures before training."""
    accepted = [accept(algorithm, order, site) for order in orders]
    works = [work for work in accepted if isinstance(work, Work)]
    return side_by_side(works, site), [failure for failure in accepted if isinstance(failure, ClientFailure)]


def side_by_side(works: Iterable[Work], site: Site) -> list[list[Work]]:
    """Return the groups for `train`, in the order of their first members. With batched numerics works of equal kind
    share a group; otherwise each is alone."""
    groups: list[list[Work]] = []
    open_groups: dict[object, list[Work]] = {}
    group: list[Work] | None = None
    before: object = None
    for work in works:
        shared = site.numerics.strategy == "batched" and not work.order.evaluates and local.can_share(work.task)
        kind = local.kind(site.layout, work.task, len(work.indices), frozenset(work.linear)) if shared else None
        key = (kind if shared else work.order.client, shared)
        if key != before:  # comparing with the previous key is quicker than the hash of a task
            group, before = open_groups.get(key), key
        if group is None or len(group) >= site.numerics.lanes:
            group = open_groups[key] = []
            groups.append(group)
        group.append(work)
    return groups


def train(works: Sequence[Work], site: Site, device: str = "cpu") -> list[Outcome]:
    """Train works of equal kind side by side.

    A ValueError is a failure of the client, because batch norm raises it for a batch of one value per channel. Other
    errors are the machine's or the code's and end the run.
    """
    if works[0].order.evaluates:
        return [_evaluated(work, site, device) for work in works]
    started = time.monotonic()
    try:
        with at_work(len(works) * tensor_bytes(works[0].received)), memory_errors():
            jobs = list(_jobs(works, site, device))
            trained = list(local.train(site.family, site.data.task, jobs, site.numerics))
    except (ModelError, MemoryError, torch.OutOfMemoryError, ValueError) as error:
        if len(works) > 1:  # the failure of one must not be a failure of the others
            return [outcome for work in works for outcome in train([work], site, device)]
        order, reason = works[0].order, str(error) or "out of memory"
        if isinstance(error, ValueError):
            reason = f"training failed: {type(error).__name__}: {first_line(error)}"
            log.warning("round %d, client %d: %s", order.round + 1, order.client, reason, exc_info=error)
        return [ClientFailure(order.round, order.client, "train", reason)]
    seconds = (time.monotonic() - started) / len(works)
    macs = macs_per_sample(site.family, works[0].task)
    algorithm = works[0].algorithm
    kept, wanted = kept_by_clients(algorithm, site.family, site.pool), client_metrics(algorithm)
    parts = zip(works, jobs, trained, strict=True)
    return [_outcome(work, job, result, site, seconds, macs, kept, wanted) for work, job, result in parts]


def _evaluated(work: Work, site: Site, device: str) -> Outcome:
    own, model = site.partition.clients[work.order.client], site.pool[work.order.level]
    return evaluated(work.order, site.family, model, site.data, own, work.indices, device)


def _jobs(works: Sequence[Work], site: Site, device: str) -> Iterator[local.Job]:
    sizes = [len(work.indices) for work in works]
    chosen = torch.from_numpy(np.concatenate([work.indices for work in works]))
    samples = torch.split(site.data.normalise(site.data.train_x[chosen].to(device)), sizes)
    targets = torch.split(site.data.train_y[chosen].to(device), sizes)
    for work, x, y in zip(works, samples, targets, strict=True):
        yield local.Job(work.task, work.start, x, y, work.linear)


def _outcome(
    work: Work,
    job: local.Job,
    trained: local.Trained,
    site: Site,
    seconds: float,
    macs: float,
    kept: Shapes,
    wanted: Sequence[ClientMetric],
) -> Outcome:
    order, task = work.order, work.task

    def failed(why: str, code: Code | None = None) -> ClientFailure:
        return ClientFailure(order.round, order.client, "train", why, code)

    if not abs(trained.loss) <= LARGEST_LOSS or not trained.finite:
        return failed(f"training diverged (learning rate {task.optimizer.lr:g})", "finite")
    metrics = {
        "loss": trained.loss,
        "steps": float(trained.steps),
        "macs": float(trained.samples * macs),
        "seconds": seconds,
        "free": work.free,
    }
    state: Params = {}
    if wanted or isinstance(work.algorithm, KeepsClientState):
        static_bn = site.pool[order.level].static_bn
        goal = site.data.task
        client = TrainedClient.of(order, task, site.family, goal, job, work.received, trained.params, static_bn)
        try:
            with memory_errors():
                state = _kept(work, client, kept)  # first, because a measurement may write into the copies
                metrics |= client.measured(wanted)
        except Rejected as error:
            return failed(f"{type(work.algorithm).__name__}.keep returns something else than it declares: {error}")
        except (ClientError, ModelError, MemoryError, torch.OutOfMemoryError) as error:
            return failed(str(error) or "out of memory")
    spec, payload = task.spec, {name: tensor.cpu() for name, tensor in trained.params.items()}
    if kept:  # parameters that a client does not send
        payload = {name: tensor for name, tensor in payload.items() if name not in kept}
    if task.mask_labels:  # the rows of classes that the client does not hold were not trained
        held = torch.unique(site.data.train_y[work.indices]).tolist()
        spec = SubmodelSpec.of({**task.spec.kept, HEAD: held}, task.spec.blocks)
        payload = take(payload, site.layout, spec, have=task.spec)
    encoding = time.monotonic()
    try:
        encoded = coding.answered(order, spec, payload, site.layout)
    except ModelError as error:
        return failed(f"codec.up cannot encode the trained weights: {error}", "finite")
    if encoded is not None:
        metrics["seconds_encode"] = time.monotonic() - encoding
    count = len(work.indices)
    return ClientUpdate(order.round, order.client, spec, payload, count, metrics, state=state, encoded=encoded)


def _kept(work: Work, client: TrainedClient, kept: Shapes) -> Params:
    """Return what the client keeps for its next assignment. Raises Rejected if it is not as `kept` declares."""
    if not isinstance(work.algorithm, KeepsClientState):
        return {}
    new = work.algorithm.keep({n: t.to(client.x.device) for n, t in work.state.items()}, client)
    state = {n: t.detach().to("cpu", copy=True) for n, t in new.items()}
    check_state(state, header(kept))
    return state


def delivered(algorithm: Algorithm, outcome: Outcome, order: WorkOrder, site: Site) -> Outcome:
    """Return the outcome of a client in this process as the server receives it: with decoded weights."""
    if isinstance(outcome, ClientFailure) or outcome.encoded is None:
        return outcome
    try:
        return received(outcome, order, replace(site.rules, algorithm=algorithm))
    except Rejected as error:
        return ClientFailure(order.round, order.client, "validate", str(error), error.code)

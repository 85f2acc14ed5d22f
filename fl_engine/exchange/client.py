"""Execute clients' assignments, one at a time or several in parallel. Every backend uses this module."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from fl_engine.core import clients
from fl_engine.core.clients import LARGEST_LOSS, Shapes, header, kept_by_clients
from fl_engine.core.contracts import Algorithm, ClientContext, ClientMetric, KeepsClientState, ModelFamily
from fl_engine.core.costs import macs_per_sample
from fl_engine.core.errors import ClientError, ModelError, first_line, kind_of, memory_errors
from fl_engine.core.failure_details import failed, watched
from fl_engine.core.samples import Data
from fl_engine.core.slicing import take
from fl_engine.core.system import at_work
from fl_engine.core.types import (
    HEAD,
    SGD,
    Assignment,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Device,
    LocalTask,
    ParamLayout,
    Params,
    Pool,
    Start,
    SubmodelSpec,
    TaskContext,
)  # fmt: skip
from fl_engine.data.partition import Partition
from fl_engine.data.partition_rules import Ints
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import Rejected
from fl_engine.exchange.updates import Rules, check_state, decode_and_check
from fl_engine.fleet import devices
from fl_engine.storage.store import tensor_bytes
from fl_engine.training import local
from fl_engine.training.evaluation import evaluate, losses_of
from fl_engine.training.numerics import SINGLE, Numerics

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Site:
    """The data, model family and settings that all clients of a run use."""

    family: ModelFamily
    pool: Pool
    fleet: tuple[Device, ...]
    data: Data
    partition: Partition
    seed: int
    numerics: Numerics = SINGLE
    free: float | None = None
    """Measured free memory of the device, in % of the full model's parameters; None if the memory is simulated."""
    held: tuple[Ints, ...] = ()
    """Indices of each client's evaluation samples (`Data.at`), not in `partition`; empty without evaluation."""
    most: int | None = None
    """Maximum sample count that a client may report; None if the server knows the counts. See `data.local_data`."""
    idle: bool = False
    """True if clients do not train (`local.untrained`), for forecasts."""

    def held_by(self, client: int) -> Ints:
        """Return the indices of a client's held-out samples."""
        return self.held[client] if self.held else np.zeros(0, dtype=np.int64)

    @cached_property
    def layout(self) -> ParamLayout:
        return self.family.layout()

    @cached_property
    def rules(self) -> Rules:
        return Rules(self, seed=self.seed)


@dataclass(frozen=True)
class Work:
    """An assignment that is ready for training. In an evaluation, `task.epochs` is 0."""

    assignment: Assignment
    task: LocalTask
    start: Params
    """Initial weights after pruning; views of the received weights if possible."""
    indices: np.ndarray
    """Indices of the client's training samples; in an evaluation, indices of the held-out samples."""
    free: float
    """Free memory in % of the full model's parameters."""
    algorithm: Algorithm
    linear: Params
    """See `Start`."""
    received: Params
    state: Params
    """State of the client after its last assignment."""


def measured(client: ClientContext, metrics: Iterable[ClientMetric]) -> dict[str, float]:
    """Return the values of a client's metrics by name. Raises ClientError if a value is out of bounds."""
    found = {}
    for metric in metrics:
        value = float(metric.measure(client))
        if not metric.low <= value <= metric.high:
            said = f"the client metric {metric.name} must be from {metric.low:g} to {metric.high:g}, got {value:g}"
            raise ClientError(f"{said}. Declare wider bounds, or clip the value")
        found[metric.name] = value
    return found


def execute(algorithm: Algorithm, assignment: Assignment, site: Site, device: str = "cpu") -> ClientResult:
    """Execute one assignment: determine the free memory, prune the model, and train."""
    work = accept(algorithm, assignment, site)
    return work if isinstance(work, ClientFailure) else train([work], site, device)[0]


@watched()
def accept(algorithm: Algorithm, assignment: Assignment, site: Site) -> Work | ClientFailure:
    """Determine the free memory and prune the model. Raises ModelError if the algorithm does not return a LocalTask."""
    round, client, payload = assignment.round, assignment.client, assignment.payload
    if assignment.evaluates:
        task = LocalTask(assignment.spec, SGD(0.0), epochs=0, batch_size=1, drop_last=False, seed=assignment.seed)
        return Work(assignment, task, payload, site.held_by(client), 0.0, algorithm, {}, payload, {})
    layout, device = site.layout, site.fleet[client]
    free = devices.observe(device, site.seed, round) if site.free is None else site.free
    context = TaskContext(layout, site.pool, device, free)
    try:
        task = algorithm.task(assignment, context)
        taken = take(payload, layout, task.spec, have=assignment.spec) if isinstance(task, LocalTask) else {}
    except (ClientError, ModelError) as error:
        return failed(assignment, "prune", str(error))
    if not isinstance(task, LocalTask):  # stop the run, because this bug affects all clients
        raise ModelError(f"{type(algorithm).__name__}.task must return a LocalTask, got {kind_of(task)}")
    indices = site.partition.clients[client]
    if not len(indices):
        return failed(assignment, "train", "a client without samples cannot train")
    # Sort the parameters in the layout's order, because sums depend on the order.
    received = {name: taken[name] for name in layout.slots if name in taken}
    memory, state = clients.split_state(assignment.memory)
    start = Start(received, {name: memory[name] for name in memory if name in received})
    if isinstance(algorithm, KeepsClientState):
        try:
            start = algorithm.begin(state, start, assignment, task, context)
            if odd := sorted(start.params.keys() ^ received.keys())[:4]:
                raise ModelError(
                    f"{type(algorithm).__name__}.begin must return exactly the sub-model's parameters, but the "
                    f"returned parameters differ in {odd}"
                )
        except (ClientError, ModelError) as error:
            return failed(assignment, "train", str(error))
    weights = {name: start.params[name] for name in received}
    return Work(assignment, task, weights, indices, free, algorithm, start.linear, received, state)


def accept_all(
    algorithm: Algorithm, assignments: Iterable[Assignment], site: Site
) -> tuple[list[list[Work]], list[ClientFailure]]:
    """Prepare assignments. Return a tuple (groups of assignments to train in parallel, failures before training).
    Groups are in the order of their first assignments. Without batched numerics, each group contains one assignment."""
    groups: list[list[Work]] = []
    failures: list[ClientFailure] = []
    open_groups: dict[object, list[Work]] = {}
    for work in (accept(algorithm, assignment, site) for assignment in assignments):
        if isinstance(work, ClientFailure):
            failures.append(work)
            continue
        shared = site.numerics.strategy == "batched" and not work.assignment.evaluates and local.can_share(work.task)
        kind = (site.layout, work.task, len(work.indices), frozenset(work.linear))
        key: object = local.kind(*kind) if shared else work.assignment.client
        group = open_groups.get(key)
        if group is None or len(group) >= site.numerics.lanes:
            group = open_groups[key] = []
            groups.append(group)
        group.append(work)
    return groups, failures


@watched()
def train(
    works: Sequence[Work], site: Site, device: str = "cpu", on_step: local.OnStep | None = None
) -> list[ClientResult]:
    """Train a group of assignments (`accept_all`) in parallel, or execute evaluations one by one. A ModelError, a
    ValueError or an out-of-memory error counts as a failure of the client. Batch norm raises ValueError for a batch
    with one value per channel. All other exceptions stop the run, because the machine or the code is the cause."""
    if works[0].assignment.evaluates:
        return [_evaluated(work, site, device) for work in works]
    started = time.monotonic()
    try:
        with at_work(len(works) * tensor_bytes(works[0].received)), memory_errors():
            jobs = list(_jobs(works, site, device))
            if site.idle:
                trained = [local.untrained(job) for job in jobs]
            else:
                trained = list(local.train(site.family, site.data.task, jobs, site.numerics, on_step=on_step))
    except (ModelError, MemoryError, torch.OutOfMemoryError, ValueError) as error:
        if len(works) > 1:  # train each client alone, because a client's failure must not affect other clients
            return [result for work in works for result in train([work], site, device)]
        assignment, reason = works[0].assignment, str(error) or "out of memory"
        if isinstance(error, ValueError):
            reason = f"training failed: {type(error).__name__}: {first_line(error)}"
            log.warning("round %d, client %d: %s", assignment.round + 1, assignment.client, reason, exc_info=error)
        return [failed(assignment, "train", reason)]
    seconds, macs = (time.monotonic() - started) / len(works), macs_per_sample(site.family, works[0].task)
    kept = kept_by_clients(works[0].algorithm, site.family, site.pool)
    return [
        _result(work, job, result, site, {"macs": float(result.samples * macs), "seconds": seconds}, kept)
        for work, job, result in zip(works, jobs, trained, strict=True)
    ]


def _jobs(works: Sequence[Work], site: Site, device: str) -> Iterator[local.TrainingJob]:
    sizes = [len(work.indices) for work in works]
    chosen = torch.from_numpy(np.concatenate([work.indices for work in works]))
    samples = torch.split(site.data.normalise(site.data.train_x[chosen].to(device)), sizes)
    targets = torch.split(site.data.train_y[chosen].to(device), sizes)
    for work, x, y in zip(works, samples, targets, strict=True):
        yield local.TrainingJob(work.task, work.start, x, y, work.linear)


def _result(
    work: Work, job: local.TrainingJob, trained: local.Trained, site: Site, cost: dict[str, float], kept: Shapes
) -> ClientResult:
    """Return the result of a client's training. `kept` maps the tensor names of the client's state to their shapes."""
    assignment, task, algorithm = work.assignment, work.task, work.algorithm
    if not abs(trained.loss) <= LARGEST_LOSS or not trained.finite:
        return failed(work.assignment, "train", f"training diverged (learning rate {task.optimizer.lr:g})", "finite")
    metrics = {"loss": trained.loss, "steps": float(trained.steps), **cost, "free": work.free}
    state: Params = {}
    wanted = clients.client_metrics(algorithm)
    if wanted or isinstance(algorithm, KeepsClientState):
        # Copy the tensors to the training device, so that an algorithm may change the copies.
        received, new = (
            {name: tensor.detach().to(job.x.device, copy=True) for name, tensor in params.items()}
            for params in (work.received, trained.params)
        )
        static_bn = site.pool[assignment.level].static_bn
        goal, family = site.data.task, site.family
        losses = partial(losses_of, family, goal, received, task.spec, job.x, job.y, static_bn)
        context = ClientContext(goal, family, assignment, task, received, new, job.x, job.y, losses)
        try:
            with memory_errors():
                if isinstance(algorithm, KeepsClientState):  # call `keep` first, because a metric may change tensors
                    before = {n: t.to(job.x.device) for n, t in work.state.items()}
                    state = {n: t.detach().to("cpu", copy=True) for n, t in algorithm.keep(before, context).items()}
                    check_state(state, header(kept))
                metrics |= measured(context, wanted)
        except Rejected as error:
            said = f"{type(algorithm).__name__}.keep must return what it declares: {error}"
            return failed(work.assignment, "train", said)
        except (ClientError, ModelError, MemoryError, torch.OutOfMemoryError) as error:
            return failed(work.assignment, "train", str(error) or "out of memory")
    spec = task.spec
    payload = {name: tensor.cpu() for name, tensor in trained.params.items() if name not in kept}
    targets = site.data.train_y[work.indices]
    if task.mask_labels and site.data.task.present(targets) is not None:
        # The rows of classes without samples were not trained.
        spec = SubmodelSpec.of({**task.spec.kept, HEAD: torch.unique(targets).tolist()}, task.spec.blocks)
        payload = take(payload, site.layout, spec, have=task.spec)
    encoding = time.monotonic()
    try:
        encoded = coding.encode_update(assignment, spec, payload, site.layout)
    except ModelError as error:
        return failed(work.assignment, "train", f"codec.up cannot encode the trained weights: {error}", "finite")
    if encoded is not None:
        metrics["seconds_encode"] = time.monotonic() - encoding
    count, (round, client) = len(work.indices), (assignment.round, assignment.client)
    return ClientUpdate(round, client, spec, payload, count, metrics, state=state, encoded=encoded)


def _evaluated(work: Work, site: Site, device: str) -> ClientResult:
    """Evaluate the received weights on the held-out samples. The result contains no tensors. With `static_bn`, the
    batch norm statistics are computed on the client's training samples."""
    assignment, data, model = work.assignment, site.data, site.pool[work.assignment.level]
    if not len(work.indices):
        return failed(work.assignment, "evaluate", "a client that holds out no samples cannot evaluate")
    own_x = data.train_x[torch.from_numpy(site.partition.clients[assignment.client])]
    x, y = data.at(torch.from_numpy(work.indices))
    how = {"ensemble": model.ensemble, "static_bn": model.static_bn}
    try:
        with memory_errors():
            score = evaluate(
                site.family, assignment.payload, assignment.spec, data, x, y, device, statistics_x=own_x, **how
            )
    except (ModelError, ValueError, MemoryError, torch.OutOfMemoryError) as error:
        # Batch norm raises ValueError for a batch with one value per channel.
        return failed(work.assignment, "evaluate", str(error) or "out of memory")
    metrics = {data.task.metric.name: score.value, "loss": score.loss}
    if wrong := clients.out_of_bounds(metrics, clients.evaluation_bounds(data.task)):
        return failed(work.assignment, "evaluate", wrong)
    return ClientUpdate(assignment.round, assignment.client, assignment.spec, {}, len(work.indices), metrics)


def deliver(algorithm: Algorithm, result: ClientResult, assignment: Assignment, site: Site) -> ClientResult:
    """Decode and check a result from this process in the same way as a result from another process."""
    if isinstance(result, ClientFailure) or result.encoded is None:
        return result
    try:
        return decode_and_check(result, assignment, replace(site.rules, algorithm=algorithm))
    except Rejected as error:
        return error.failure(assignment)

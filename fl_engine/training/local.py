"""The local training loop, used by clients, by the server's pre-training on its proxy, and by central training.

It trains several clients side by side (`lanes`), or one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor

from fl_engine.core import costs
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError, first_line
from fl_engine.core.samples import batch_layout
from fl_engine.core.slicing import is_statistic, largest
from fl_engine.core.task import Task
from fl_engine.core.types import SGD, Adam, LocalTask, OwnOptimizer, ParamLayout, Params
from fl_engine.training import batches, lanes, optimizers, user_code
from fl_engine.training.numerics import SINGLE, Numerics
from fl_engine.training.objective import Objective, Setting, objective_of
from fl_engine.training.optimizers import SCALE, LossScale


@dataclass(frozen=True)
class Job:
    """One client's work."""

    task: LocalTask
    start: Params
    """The weights of the sub-model `task.spec` to start from."""
    x: Tensor
    """(N, ...): normalised samples, on the torch device that trains."""
    y: Tensor
    """(N, ...): their targets, on the same device."""
    linear: Params = field(default_factory=dict)
    """What FedDyn subtracts from the gradient, by parameter name. A parameter that it lacks keeps its gradient."""
    anchor: Params | None = None
    """The weights that the proximal term pulls to; None: `start`."""


@dataclass(frozen=True)
class Trained:
    params: Params
    """float32."""
    loss: float
    """The mean of the objective over all steps, without the proximal and linear terms, which only change gradients."""
    finite: bool
    """Whether all weights are finite and within `slicing.largest`."""
    steps: int
    samples: int
    """A sample counts once for each time it was seen."""


def train(
    family: ModelFamily,
    goal: Task,
    jobs: Sequence[Job],
    numerics: Numerics = SINGLE,
    most_steps: int | None = None,
) -> list[Trained]:
    """Train each job from its own copy of the weights: side by side, which needs jobs of equal `kind`, or one after the
    other with `single` numerics and on devices other than a CPU.

    With `drop_last`, a last batch smaller than `batch_size` is dropped unless it is the only one. (The authors' loader
    drops it, too, so a client with few samples trains nothing.) The bits depend only on the job and the numerics: all
    randomness comes from `task.seed`. For measurements, an epoch ends after `most_steps`.
    """
    if any(len(job.y) == 0 for job in jobs):
        raise ModelError("a client without samples cannot train")
    if numerics.strategy == "single" or jobs[0].x.device.type != "cpu" or not can_share(jobs[0].task):
        return [trained for job in jobs for trained in _train(family, goal, [job], numerics, most_steps)]
    if len(jobs) == 1:  # a single lane has other bits than one of several
        return _train(family, goal, [*jobs, *jobs], numerics, most_steps)[:1]
    return _train(family, goal, jobs, numerics, most_steps)


def can_share(task: LocalTask) -> bool:
    """Whether clients with this task can train side by side. With ordered dropout each client draws its own widths.
    Adam's kernel rounds the last elements of a tensor differently, and these belong to the last lane. An objective or
    an optimizer of one's own takes one network."""
    return not task.widths and isinstance(task.optimizer, SGD) and task.objective is None


def kind(layout: ParamLayout, task: LocalTask, samples: int, remembered: frozenset[str] = frozenset()) -> object:
    """Tasks of equal kind take the same steps on the same shapes: their sub-models keep equally many channels, and with
    distillation the same ones, because the teachers are leading channels of the student."""
    spec = task.spec if task.distillation else layout.form(task.spec)
    return spec, _rest(task), costs.batches(task, samples), remembered


_rest = attrgetter(*(f.name for f in fields(LocalTask) if f.name not in ("spec", "seed")))


def _train(
    family: ModelFamily, goal: Task, jobs: Sequence[Job], numerics: Numerics, most_steps: int | None
) -> list[Trained]:
    with opened(family, goal, jobs, numerics) as session:
        for _ in range(jobs[0].task.epochs):
            session.epoch(most_steps)
    return session.trained()


@contextmanager
def opened(family: ModelFamily, goal: Task, jobs: Sequence[Job], numerics: Numerics) -> Iterator[Session]:
    """A session for jobs of equal kind, which borrows networks until the context ends."""
    with ExitStack() as borrowed:
        yield Session(family, goal, jobs, numerics, borrowed)


class Session:
    def __init__(
        self, family: ModelFamily, goal: Task, jobs: Sequence[Job], numerics: Numerics, borrowed: ExitStack
    ) -> None:
        if numerics.precision == "fp16":
            jobs = [_in_half(job) for job in jobs]
        self._goal, task, self._device = goal, jobs[0].task, jobs[0].x.device
        batches.check(task.sampler, task.augment, goal, jobs[0].x)
        self.done = self.steps = self.samples = 0
        self.total = torch.zeros(len(jobs), dtype=torch.float64, device=self._device)
        """(n,): the sum of each lane's losses over all steps."""
        self._tasks, self._state = [job.task for job in jobs], lanes.stack([job.start for job in jobs], self._device)
        weights = {name: t.requires_grad_() for name, t in self._state.items() if not is_statistic(name)}
        self._weights = list(weights.values())
        shared = all(job.x is jobs[0].x and job.y is jobs[0].y for job in jobs)
        held = jobs[:1] if shared else jobs
        self._x, self._y = batches.joined([job.x for job in held]), batches.joined([job.y for job in held])
        self._moments: Params = {}
        self._own = user_code.parameters_of(weights) if user_code.is_own(task) else {}
        """The user's code gets these instead of the weights (1, ...), whose memory they share."""
        if isinstance(task.optimizer, OwnOptimizer):
            self._step = user_code.stepper(task, self._own, weights)
        else:
            self._step = optimizers.stepper(task.optimizer, weights, self._moments)
        self._scale = None
        if numerics.scales(self._device):
            self._scale = LossScale(self._step, weights, self._moments, self.total)
        anchors = [job.start if job.anchor is None else job.anchor for job in jobs]
        linear = [job.linear for job in jobs]
        self._correct = optimizers.gradient_terms(task, self._state, anchors, linear, self._device)
        targets = [job.y for job in jobs]
        setting = Setting(family, goal, self._tasks, targets, self._state, numerics, borrowed)
        self._streams = setting.streams
        self._objective: Objective
        if task.objective is None:
            self._objective = objective_of(setting)
        else:
            self._objective = user_code.objective(setting, jobs[0].start, self._own)
        self._draw = partial(batches.orders, goal, self._tasks, targets, shared=shared)
        self._orders = self._draw()

    def epoch(self, most_steps: int | None = None) -> None:
        """Train one epoch, or its first steps."""
        task, order = self._tasks[0], next(self._orders)
        if isinstance(task.optimizer, Adam) and task.optimizer.reset:
            optimizers.forget(self._moments)
        for chosen_bn in order[:most_steps]:
            rate = task.schedule.rate(task.optimizer.lr, self.steps, len(order), task.epochs)
            chosen = chosen_bn.to(self._device)
            x, y = batches.gathered(self._goal, self._x, self._y, chosen, self._tasks, self.steps)
            try:
                loss_n = self._objective(batch_layout(x), y)
            except ValueError as error:
                if len(chosen) > 1 or "Expected more than 1" not in str(error):  # torch's message for a batch norm
                    raise
                raise ModelError(
                    f"a batch of one sample cannot be trained: {first_line(error)}. Drop a last batch that is not "
                    "full (training.drop_last=true), or set another batch_size"
                ) from error
            for weight in (*self._weights, *self._own.values()):
                weight.grad = None
            scale = self._scale
            (loss_n if scale is None else scale.scaled(loss_n)).sum().backward()  # type: ignore[no-untyped-call]
            if task.objective is not None:
                user_code.hand_gradients(self._own, self._state)
            if scale is not None:
                scale.unscale()
            self._correct()
            (self._step if scale is None else scale.step)(rate)
            self.total += loss_n.detach()
            self.steps, self.samples = self.steps + 1, self.samples + len(chosen)
        self.done += 1

    def trained(self) -> list[Trained]:
        means = (self.total / max(1, self.steps)).tolist()
        whole = _within(self._state)
        found = lanes.unstack({name: tensor.float() for name, tensor in self._state.items()})
        parts = ((params, loss, whole or _within(params)) for params, loss in zip(found, means, strict=True))
        return [Trained(params, loss, finite, self.steps, self.samples) for params, loss, finite in parts]

    def snapshot(self) -> Params:
        """A copy on the CPU of everything besides the jobs that the next epochs depend on: weights, the optimizer's
        state, the states of the networks' generators, and the counts."""
        counted = {"done": self.done, "steps": self.steps, "samples": self.samples}
        parts: dict[str, Params] = {
            "weights": self._state,
            "moments": self._moments,
            "streams": {name: stream.get_state() for name, stream in self._streams.items()},
            "counted": {"loss": self.total} | {name: torch.tensor(count) for name, count in counted.items()},
        }
        return {f"{part}/{name}": t.detach().cpu().clone() for part, of in parts.items() for name, t in of.items()}

    @torch.no_grad()
    def restore(self, snapshot: Params) -> None:
        """Resume after a snapshot of the same jobs."""
        weights, moments, streams, counted = (
            _part(snapshot, of) for of in ("weights", "moments", "streams", "counted")
        )
        likes = {name: self._state.get(name.partition("/")[2], self.total) for name in moments}
        if (
            _shapes(weights) != _shapes(self._state)
            or any(t.dim() and t.shape != likes[name].shape for name, t in moments.items())
            or set(streams) != set(self._streams)
            or (SCALE in moments) != (self._scale is not None)
            or set(counted) != {"loss", "done", "steps", "samples"}
            or int(counted["done"]) > self._tasks[0].epochs
        ):
            raise ModelError(
                "the snapshot is of another training: its network, dropout or epochs differ. Resume with its task, "
                "or start again"
            )
        for name, tensor in self._state.items():
            tensor.copy_(weights[name])
        self._moments.clear()
        for name, tensor in moments.items():
            # The kernels pair a weight with its moments by position in memory, so both need the same layout.
            like = likes[name] if tensor.dim() else tensor
            # If the precision has changed, the optimizer's moments get the weights' type; a loss scale keeps its own.
            kind = tensor.dtype if like is self.total else like.dtype
            self._moments[name] = torch.empty_like(like, dtype=kind, device=self._device).copy_(tensor)
        for name, stream in self._streams.items():
            stream.set_state(streams[name])
        self.total.copy_(counted["loss"])
        self.done, self.steps, self.samples = (int(counted[name]) for name in ("done", "steps", "samples"))
        self._orders = islice(self._draw(), self.done, None)


def _in_half(job: Job) -> Job:
    """The job with weights and samples in float16 and without weight decay. Tokens and targets keep their type."""
    if not isinstance(job.task.optimizer, SGD):
        raise ModelError(
            "run.precision=fp16 supports only SGD, because Adam's eps, for example, is 0 in float16. Set "
            f"central.optimizer=sgd, leave out {user_code.OPTIMIZER}, or set run.precision=amp"
        )
    start, linear = ({name: t.half() for name, t in params.items()} for params in (job.start, job.linear))
    x = job.x.half() if job.x.is_floating_point() else job.x
    task = replace(job.task, optimizer=replace(job.task.optimizer, weight_decay=0.0))
    anchor = None if job.anchor is None else {name: t.half() for name, t in job.anchor.items()}
    return replace(job, task=task, start=start, x=x, linear=linear, anchor=anchor)


def _part(snapshot: Params, part: str) -> Params:
    return {name.removeprefix(f"{part}/"): t for name, t in snapshot.items() if name.startswith(f"{part}/")}


def _shapes(params: Params) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in params.items()}


def _within(params: Params) -> bool:
    """Whether all values are within `largest`; a NaN never is."""
    ends = torch.stack([end for tensor in params.values() for end in tensor.detach().aminmax()]).tolist()
    limits = (largest(name) for name in params for _ in range(2))
    return all(abs(end) <= limit for end, limit in zip(ends, limits, strict=True))

"""Trains sub-models on local data. Clients, the server's pre-training and central training use this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from fl_engine.core import costs
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError, first_line
from fl_engine.core.samples import batch_layout
from fl_engine.core.slicing import is_statistic, largest, under
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, LocalTask, OwnOptimizer, ParamLayout, Params, SubmodelSpec
from fl_engine.training import batches, lanes, optimizers, user_code
from fl_engine.training.numerics import SINGLE, Numerics
from fl_engine.training.objective import Objective, Setting, objective_of
from fl_engine.training.optimizers import SCALE, LossScale


@dataclass(frozen=True)
class TrainingJob:
    """Input for the training of one client in a round."""

    task: LocalTask
    start: Params
    """Initial weights of the sub-model `task.spec`."""
    x: Tensor
    """Normalised samples (N, ...), on the torch device for training."""
    y: Tensor
    """Targets of the samples (N, ...), on the same device."""
    linear: Params = field(default_factory=dict)
    """Maps parameter names to terms that are subtracted from the gradients at every step (FedDyn)."""


@dataclass(frozen=True)
class Trained:
    params: Params
    """Trained weights in float32."""
    loss: float
    """Mean loss over all steps, without the proximal and linear terms, which only change gradients."""
    finite: bool
    """True if all weights are finite and their absolute values are at most `slicing.largest`."""
    steps: int
    samples: int
    """Number of processed samples; a sample that is processed in several steps counts several times."""


OnStep = Callable[[SubmodelSpec, Params, tuple[Tensor, Tensor]], None]
"""Function that receives the sub-model, its weights, and the batch (samples, targets) of the next training step."""


def train(
    family: ModelFamily,
    goal: Task,
    jobs: Sequence[TrainingJob],
    numerics: Numerics = SINGLE,
    most_steps: int | None = None,
    on_step: OnStep | None = None,
) -> list[Trained]:
    """Train each job from its own copy of the weights. With `batched` numerics on a CPU, jobs train in parallel, and
    `kind` must return the same key for all jobs. Otherwise jobs train one after the other.

    With `drop_last`, a last batch smaller than `batch_size` is dropped unless it is the only batch. In the authors'
    code, a client with a single small batch does not train. The result depends only on the job and the numerics,
    because all randomness comes from `task.seed`. `most_steps` limits the number of steps per epoch, for measurements.
    `on_step` is called before each step of the first job.
    """
    if any(len(job.y) == 0 for job in jobs):
        raise ModelError("a client must have at least one sample to train, got 0")
    if numerics.strategy == "single" or jobs[0].x.device.type != "cpu" or not can_share(jobs[0].task):
        groups: list[Sequence[TrainingJob]] = [[job] for job in jobs]
    else:  # Stack two copies of a single job, because training one job rounds differently.
        groups = [jobs if len(jobs) > 1 else [*jobs, *jobs]]
    found: list[Trained] = []
    for group in groups:
        with Session(family, goal, group, numerics) as session:
            for _ in range(group[0].task.epochs):
                session.epoch(most_steps, on_step)
        found += session.trained()
    return found[: len(jobs)]


def untrained(job: TrainingJob) -> Trained:
    """Return the result of a job without training. All weights are negated, because equal weights have short codes."""
    params = {name: tensor if is_statistic(name) else -tensor for name, tensor in job.start.items()}
    steps, samples = costs.steps(job.task, len(job.y)), costs.draws(job.task, len(job.y))
    return Trained(params, loss=1.0, finite=True, steps=max(1, steps), samples=samples)


def can_share(task: LocalTask) -> bool:
    """Return True if clients with this task can train in parallel lanes.

    Ordered dropout does not support lanes, because each client draws its own widths. Adam does not support lanes,
    because Adam's kernel rounds the last elements of a tensor differently, and these elements belong to the last lane.
    User-defined objectives and optimizers do not support lanes, because they expect a single network.
    """
    return not task.widths and isinstance(task.optimizer, SGD) and task.objective is None


def kind(layout: ParamLayout, task: LocalTask, samples: int, remembered: frozenset[str] = frozenset()) -> object:
    """Return a key for the steps and tensor shapes of a task. Clients with the same key can train in parallel. With
    distillation, the key contains the sub-model's channels, because a teacher has its student's leading channels."""
    spec = task.spec if task.distillation else layout.form(task.spec)
    return spec, replace(task, spec=FULL, seed=0), costs.batches(task, samples), remembered


class Session:
    """Training session for jobs with the same key (`kind`). At the end, the networks are returned to a cache."""

    def __init__(self, family: ModelFamily, goal: Task, jobs: Sequence[TrainingJob], numerics: Numerics) -> None:
        self._borrowed = ExitStack()
        if numerics.precision == "fp16":
            jobs = [_in_half(job) for job in jobs]
        self._goal, task, self._device = goal, jobs[0].task, jobs[0].x.device
        batches.check(task.sampler, task.augment, goal, jobs[0].x)
        self.done = self.steps = self.samples = 0
        self.total = torch.zeros(len(jobs), dtype=torch.float64, device=self._device)
        """Sum of the losses of each lane over all steps, (n,)."""
        self._tasks, self._state = [job.task for job in jobs], lanes.stack([job.start for job in jobs], self._device)
        weights = {name: t.requires_grad_() for name, t in self._state.items() if not is_statistic(name)}
        self._weights = list(weights.values())
        shared = all(job.x is jobs[0].x and job.y is jobs[0].y for job in jobs)
        held = jobs[:1] if shared else jobs
        self._x, self._y = batches.joined([job.x for job in held]), batches.joined([job.y for job in held])
        self._moments: Params = {}
        is_own = task.objective is not None or isinstance(task.optimizer, OwnOptimizer)
        self._own = user_code.parameters_of(weights) if is_own else {}
        """Parameters for the user's loss and optimizer. The parameters share memory with the weights (1, ...)."""
        if isinstance(task.optimizer, OwnOptimizer):
            self._step = user_code.stepper(task, self._own, weights)
        else:
            self._step = optimizers.stepper(task.optimizer, weights, self._moments)
        self._scale = None
        if numerics.scales(self._device):
            self._scale = LossScale(self._step, weights, self._moments, self._device)
        starts, linear = [job.start for job in jobs], [job.linear for job in jobs]
        self._correct = optimizers.gradient_terms(task, self._state, starts, linear, self._device)
        targets = [job.y for job in jobs]
        setting = Setting(family, goal, self._tasks, targets, self._state, numerics, self._borrowed)
        self._streams = setting.streams
        self._objective: Objective
        if task.objective is None:
            self._objective = objective_of(setting)
        else:
            self._objective = user_code.objective(setting, jobs[0].start, self._own)
        self._draw = partial(batches.orders, goal, self._tasks, targets, shared=shared)
        self._orders = self._draw()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._borrowed.close()

    def epoch(self, most_steps: int | None = None, on_step: OnStep | None = None) -> None:
        """Train one epoch or its first `most_steps` steps. `on_step` is called before each step of the first lane."""
        task, order = self._tasks[0], next(self._orders)
        for chosen_bn in order[:most_steps]:
            rate = task.schedule.rate(task.optimizer.lr, self.steps, len(order), task.epochs)
            chosen = chosen_bn.to(self._device)
            x, y = batches.gathered(self._goal, self._x, self._y, chosen, self._tasks, self.steps)
            if on_step is not None:
                first = {name: tensor[0].detach() for name, tensor in self._state.items()}
                on_step(task.spec, first, (x[:, : x.shape[1] // len(self._tasks)], y[:, 0]))
            try:
                loss_n = self._objective(batch_layout(x), y)
            except ValueError as error:
                if len(chosen) > 1 or "Expected more than 1" not in str(error):  # from batch norm
                    raise
                text = f"training failed on a batch of one sample: {first_line(error)}"
                raise ModelError(f"{text}. Set training.drop_last=true or change training.batch_size") from error
            for weight in (*self._weights, *self._own.values()):
                weight.grad = None
            scale = self._scale
            (loss_n if scale is None else scale.scaled(loss_n)).sum().backward()  # type: ignore[no-untyped-call]
            if task.objective is not None:
                user_code.copy_gradients(self._own, self._state)
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
        """Return a CPU copy of the training state: weights, optimizer state, random generators, counters."""
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
        """Resume from a snapshot of the same jobs. Raises ModelError if the network or the precision has changed."""
        weights, moments, counted = (under(snapshot, f"{name}/") for name in ("weights", "moments", "counted"))
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in self._state.items()}:
            raise ModelError("the snapshot belongs to another network. Resume with the same network or start a new run")
        if (SCALE in moments) != (self._scale is not None):
            raise ModelError("the snapshot belongs to another precision or device type. Resume with the same settings")
        for name, tensor in self._state.items():
            tensor.copy_(weights[name])
        self._moments.clear()
        for name, tensor in moments.items():
            # The optimizer's kernels require the same memory layout for weights and moments.
            like = self._state.get(name.partition("/")[2], self.total) if tensor.dim() else tensor
            # If the precision has changed, convert the optimizer's moments to the dtype of the weights.
            kind = tensor.dtype if like is self.total else like.dtype
            self._moments[name] = torch.empty_like(like, dtype=kind, device=self._device).copy_(tensor)
        for name, stream in self._streams.items():
            stream.set_state(snapshot[f"streams/{name}"])
        self.total.copy_(counted["loss"])
        self.done, self.steps, self.samples = (int(counted[name]) for name in ("done", "steps", "samples"))
        self._orders = islice(self._draw(), self.done, None)


def _in_half(job: TrainingJob) -> TrainingJob:
    """Convert the job's weights and samples to float16, except tokens and targets. Weight decay is set to 0."""
    if not isinstance(job.task.optimizer, SGD):
        cure = f"Set central.optimizer=sgd and {user_code.OPTIMIZER}=null, or set run.precision=amp"
        raise ModelError.at(f"run.precision=fp16 supports only SGD. {cure}")
    start, linear = ({name: t.half() for name, t in params.items()} for params in (job.start, job.linear))
    x = job.x.half() if job.x.is_floating_point() else job.x
    task = replace(job.task, optimizer=replace(job.task.optimizer, weight_decay=0.0))
    return replace(job, task=task, start=start, x=x, linear=linear)


def _within(params: Params) -> bool:
    """Return True if the absolute values of all weights are at most `largest`. Return False if a weight is NaN."""
    ends = torch.stack([end for tensor in params.values() for end in tensor.detach().aminmax()]).tolist()
    limits = (largest(name) for name in params for _ in range(2))
    return all(abs(end) <= limit for end, limit in zip(ends, limits, strict=True))

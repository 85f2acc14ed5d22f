"""The one local training loop. Clients use it, and so does the server's proxy pre-training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine import seeds
from fl_engine.errors import ModelError
from fl_engine.losses import self_distillation
from fl_engine.slicing import runnable, take
from fl_engine.types import SGD, LocalTask, ModelFamily, Params


@dataclass(frozen=True)
class Job:
    """One client's work: what to do, from which weights (the sub-model `task.spec`), on which samples.

    `x_nchw` is float32 and normalised, `y_n` int64; both and the weights lie on one torch device.
    """

    task: LocalTask
    start: Params
    x_nchw: Tensor
    y_n: Tensor


@dataclass(frozen=True)
class Trained:
    """`loss` is the mean over all steps of the whole objective; not finite when training diverged."""

    params: Params
    loss: float
    steps: int


def train(family: ModelFamily, jobs: Iterable[Job]) -> Iterator[Trained]:
    """Trains each job from its own copy of the weights; yields in order.

    A last batch smaller than `batch_size` is dropped with `drop_last`, unless it is the only one: a client with
    few samples would train nothing (the authors' loader yields no batch at all there).
    Bits depend on the job alone: order, dropout and initial weights come from `task.seed` and `start`.
    """
    for job in jobs:
        yield _train_one(family, job)


def _train_one(family: ModelFamily, job: Job) -> Trained:
    task, n = job.task, len(job.y_n)
    if n == 0:
        raise ModelError("a client without samples cannot train")
    start = {name: tensor.detach().clone() for name, tensor in job.start.items()}
    module = runnable(family, task.spec, start).train()
    order = torch.Generator().manual_seed(seeds.derive(task.seed, "order"))
    seed_dropout(module, seeds.derive(task.seed, "dropout"), job.x_nchw.device)
    teachers = _teachers(family, task, module, job.x_nchw.device)
    optimizer = _optimizer(task, module)

    batch = min(task.batch_size, n)
    steps_per_epoch = n // batch if task.drop_last else math.ceil(n / batch)
    total = torch.zeros((), dtype=torch.float64, device=job.x_nchw.device)
    for _ in range(task.epochs):
        permutation = torch.randperm(n, generator=order).to(job.y_n.device)
        for step in range(steps_per_epoch):
            chosen = permutation[step * batch : (step + 1) * batch]
            x, y = job.x_nchw[chosen], job.y_n[chosen]
            logits = module(x)
            loss = F.cross_entropy(logits, y)
            if task.distillation is not None and teachers:
                with torch.no_grad():
                    soft = [teacher(x) for teacher in teachers]
                loss = loss + task.distillation.weight * self_distillation(
                    logits, soft, task.distillation.temperature
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
    steps = steps_per_epoch * task.epochs
    return Trained({k: v.detach() for k, v in module.state_dict().items()}, float(total) / max(1, steps), steps)


def _teachers(family: ModelFamily, task: LocalTask, module: nn.Module, device: torch.device) -> list[nn.Module]:
    """Sub-networks whose weights are views of the weights in training, so they are current at every step."""
    if task.distillation is None or task.distillation.weight == 0:
        return []
    layout, buffers = family.layout(), {name for name, _ in module.named_buffers()}
    out = []
    for i, spec in enumerate(task.distillation.teachers):
        state = {k: v.detach() for k, v in module.state_dict().items()}
        views = take(state, layout, spec, have=task.spec)
        for name, view in views.items():
            if view.untyped_storage().data_ptr() != state[name].untyped_storage().data_ptr():
                raise ModelError(f"a teacher must be made of leading channels of the student; in {name} it is not")
        # A teacher's forward pass must not write the running statistics of the network in training.
        own = {name: view.clone() if name in buffers else view for name, view in views.items()}
        teacher = runnable(family, spec, own).train().requires_grad_(False)
        seed_dropout(teacher, seeds.derive(task.seed, f"teacher{i}"), device)
        out.append(teacher)
    return out


def _optimizer(task: LocalTask, module: nn.Module) -> torch.optim.Optimizer:
    o = task.optimizer
    if isinstance(o, SGD):
        return torch.optim.SGD(module.parameters(), o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    return torch.optim.Adam(module.parameters(), o.lr)


class _SeededDropout(nn.Module):
    """Dropout that draws from its own generator: clients trained side by side must not share one."""

    def __init__(self, p: float, generator: torch.Generator) -> None:
        super().__init__()
        self.p = p
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * keep / (1 - self.p)


def seed_dropout(module: nn.Module, seed: int, device: torch.device) -> None:
    """Replaces every `nn.Dropout` in place by one that draws from `seed`."""
    generator: torch.Generator | None = None
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                generator = generator or torch.Generator(device=device).manual_seed(seed)
                setattr(parent, name, _SeededDropout(child.p, generator).train(child.training))

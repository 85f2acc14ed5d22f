"""The one local training loop. Clients use it, and so does the server's proxy pre-training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine import losses, seeds
from fl_engine.errors import ModelError
from fl_engine.slicing import runnable, take
from fl_engine.types import SGD, LocalTask, ModelFamily, Params


@dataclass(frozen=True)
class Job:
    """One client's work: what to do, from which weights (the sub-model `task.spec`), on which samples.

    `x_nchw` is float32 and normalised, `y_n` int64; both and the weights lie on one torch device. `linear` holds, by
    parameter, what FedDyn subtracts from the gradient (shapes of the weights; a parameter without one: nothing).
    """

    task: LocalTask
    start: Params
    x_nchw: Tensor
    y_n: Tensor
    linear: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """`loss` is the mean over all steps of the objective (less the proximal and linear terms, which act on the
    gradient alone); not finite when training diverged. `samples` counts a sample once for each time it was seen."""

    params: Params
    loss: float
    steps: int
    samples: int


Objective = Callable[[Tensor, Tensor], Tensor]
"""A batch (B, C, H, W) and its labels (B,) to the loss of the current weights."""


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
    objective = _objective(family, job, module)
    optimizer = _optimizer(task, module)
    correct = _gradient_terms(job, module)

    batch = min(task.batch_size, n)
    steps_per_epoch = n // batch if task.drop_last else math.ceil(n / batch)
    total = torch.zeros((), dtype=torch.float64, device=job.x_nchw.device)
    samples = 0
    for _ in range(task.epochs):
        permutation = torch.randperm(n, generator=order).to(job.y_n.device)
        for step in range(steps_per_epoch):
            chosen = permutation[step * batch : (step + 1) * batch]
            loss = objective(job.x_nchw[chosen], job.y_n[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            correct()
            optimizer.step()
            total += loss.detach()
            samples += len(chosen)
    steps = steps_per_epoch * task.epochs
    params = {k: v.detach() for k, v in module.state_dict().items()}
    return Trained(params, float(total) / max(1, steps), steps, samples)


# ---------------------------------------------------------------------------------------------- the objective
def _objective(family: ModelFamily, job: Job, module: nn.Module) -> Objective:
    """Cross entropy, and whatever the task asks for besides."""
    task = job.task
    forward = _one_of_widths(family, task, module, job.x_nchw.device) if task.widths else module
    _scale(family, module, task.scaler)
    teachers = _teachers(family, task, module, job.x_nchw.device)
    present = _present(family, job.y_n) if task.mask_labels else None

    def objective(x: Tensor, y: Tensor) -> Tensor:
        out = forward(x)
        logits: tuple[Tensor, ...] = out if isinstance(out, tuple) else (out,)
        if present is not None:
            logits = tuple(losses.mask_absent(each, present) for each in logits)
        if task.exits is not None:
            e = task.exits
            loss = losses.exits_cross_entropy(logits, y, e.weights)
            if e.kd_weight > 0 and len(logits) > 1:
                distil = losses.distil_from_last if e.teachers == "last" else losses.distil_mutually
                loss = loss + e.kd_weight * distil(logits, e.temperature)
            return loss
        loss = F.cross_entropy(logits[-1], y)
        if task.distillation is not None and teachers:
            with torch.no_grad():
                soft = [teacher(x) for teacher in teachers]
            d = task.distillation
            loss = loss + d.weight * losses.self_distillation(logits[-1], soft, d.temperature)
        return loss

    return objective


def _present(family: ModelFamily, y_n: Tensor) -> Tensor:
    """bool (classes,): the labels that occur."""
    return torch.bincount(y_n, minlength=family.classes) > 0


def _scale(family: ModelFamily, module: nn.Module, rate: float) -> None:
    """HeteroFL's scaler: every convolution and hidden layer puts out 1/rate times as much."""
    if rate == 1:
        return
    slots = family.layout().slots
    for name, layer in module.named_modules():
        weight = f"{name}.weight"
        if isinstance(layer, nn.Conv2d | nn.Linear) and slots[weight].axes[0].group != "classes":
            layer.register_forward_hook(lambda _, __, out: out / rate)


def _one_of_widths(
    family: ModelFamily, task: LocalTask, module: nn.Module, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Ordered dropout (FjORD): each call runs one of the sub-models, drawn uniformly, on slices of the weights; the
    gradient flows into the slices, and is zero elsewhere."""
    if list(module.buffers()):
        raise ModelError("ordered dropout keeps no running statistics (they differ by width): use norm=batch")
    layout = family.layout()
    with torch.device("meta"):
        networks = [family.module(spec).train() for spec in task.widths]
    for i, network in enumerate(networks):
        seed_dropout(network, seeds.derive(task.seed, f"width{i}"), device)
    draw = torch.Generator().manual_seed(seeds.derive(task.seed, "widths"))

    def forward(x: Tensor) -> Tensor:
        i = int(torch.randint(len(networks), (1,), generator=draw))
        weights = take(dict(module.named_parameters()), layout, task.widths[i], have=task.spec)
        out: Tensor = torch.func.functional_call(networks[i], weights, (x,))
        return out

    return forward


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


# --------------------------------------------------------------------------------------------- the step
def _optimizer(task: LocalTask, module: nn.Module) -> torch.optim.Optimizer:
    o = task.optimizer
    if isinstance(o, SGD):
        return torch.optim.SGD(module.parameters(), o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    return torch.optim.Adam(module.parameters(), o.lr)


def _gradient_terms(job: Job, module: nn.Module) -> Callable[[], None]:
    """What is added to the gradient after the backward pass: mu * (theta - theta_received) (FedProx), minus the linear
    term (FedDyn); then the norm is clipped."""
    task = job.task
    mu, limit = task.proximal, task.clip_norm
    named = dict(module.named_parameters())
    pulled = [(p, job.start[name].detach()) for name, p in named.items()] if mu > 0 else []
    pushed = [(named[name], g) for name, g in job.linear.items() if name in named]

    def correct() -> None:
        with torch.no_grad():
            for p, received in pulled:
                if p.grad is not None:
                    p.grad.add_(p - received, alpha=mu)
            for p, g in pushed:
                if p.grad is not None:
                    p.grad.sub_(g)
        if limit is not None:
            nn.utils.clip_grad_norm_(module.parameters(), limit)

    return correct


# ----------------------------------------------------------------------------------------------- dropout
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

"""The one local training loop. Clients use it, and so does the server's proxy pre-training.

It trains a group of clients side by side (`lanes`), or a group of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import Task, batch_layout
from fl_engine.core.slicing import is_statistic, largest, take
from fl_engine.core.types import HEAD, SGD, LocalTask, ParamLayout, Params, SubmodelSpec
from fl_engine.core.workload import batches
from fl_engine.training import lanes, losses
from fl_engine.training.lanes import Network
from fl_engine.training.numerics import SINGLE, Numerics
from fl_engine.training.shared_layers import Seen, shared


@dataclass(frozen=True)
class Job:
    """One client's work: what to do, from which weights (the sub-model `task.spec`), on which samples.

    `x` (N, ...) is normalised, `y` (N, ...) are its targets, both on the torch device that trains. `linear` holds, by
    parameter, what FedDyn subtracts from the gradient (shapes of the weights; a parameter without one: nothing).
    """

    task: LocalTask
    start: Params
    x: Tensor
    y: Tensor
    linear: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """`loss` is the mean over all steps of the objective (less the proximal and linear terms, which act on the
    gradient alone). `finite`: whether all weights are, and within `slicing.largest`. `samples` counts a sample once
    for each time it was seen."""

    params: Params
    loss: float
    finite: bool
    steps: int
    samples: int


def train(family: ModelFamily, goal: Task, jobs: Sequence[Job], numerics: Numerics = SINGLE) -> list[Trained]:
    """Trains each job towards the goal from its own copy of the weights: side by side, which takes jobs of equal
    `kind`, or one after the other with `single` numerics.

    A last batch smaller than `batch_size` is dropped with `drop_last`, unless it is the only one: a client with
    few samples would train nothing (the authors' loader yields no batch at all there).
    Bits depend on the job and the numerics alone: order, dropout and initial weights come from `task.seed` and `start`.
    """
    if any(len(job.y) == 0 for job in jobs):
        raise ModelError("a client without samples cannot train")
    if numerics.strategy == "single" or not can_share(jobs[0].task):
        return [trained for job in jobs for trained in _train(family, goal, [job], numerics)]
    if len(jobs) == 1:  # a lane on its own would have other bits: a copy runs beside it
        return _train(family, goal, [*jobs, *jobs], numerics)[:1]
    return _train(family, goal, jobs, numerics)


def can_share(task: LocalTask) -> bool:
    """Whether clients with such a task can train side by side. In ordered dropout each draws widths of its own; Adam's
    kernel rounds the last elements of a tensor, those of the last lane, in another way."""
    return not task.widths and isinstance(task.optimizer, SGD)


def kind(layout: ParamLayout, task: LocalTask, samples: int, remembered: frozenset[str] = frozenset()) -> object:
    """Tasks of equal kind do the same steps on the same shapes. Which channels a sub-model keeps does not matter, but
    how many; a distillation's teachers lie in the student as its first channels, and are compared as they are."""
    spec = task.spec if task.distillation else layout.form(task.spec)
    return spec, _rest(task), batches(task, samples), remembered


_rest = attrgetter(*(f.name for f in fields(LocalTask) if f.name not in ("spec", "seed")))


def _train(family: ModelFamily, goal: Task, jobs: Sequence[Job], numerics: Numerics) -> list[Trained]:
    task, device = jobs[0].task, jobs[0].x.device
    state = lanes.stack([job.start for job in jobs], device)
    weights = [t.requires_grad_() for name, t in state.items() if not is_statistic(name)]
    samples_of_all = torch.cat([job.x for job in jobs])
    targets = torch.cat([job.y for job in jobs])
    step = _stepper(task, weights)
    correct = _gradient_terms(jobs, state)

    total = torch.zeros(len(jobs), dtype=torch.float64, device=device)
    steps = samples = 0
    with ExitStack() as borrowed:
        objective = _objective(family, goal, jobs, state, numerics, borrowed)
        for chosen_bn in _order(jobs):
            chosen = chosen_bn.to(device)
            x = samples_of_all[chosen.flatten()].view(len(chosen), -1, *samples_of_all.shape[2:])
            loss_n = objective(batch_layout(x), targets[chosen])
            for weight in weights:
                weight.grad = None
            loss_n.sum().backward()  # type: ignore[no-untyped-call]
            correct()
            step()
            total += loss_n.detach()
            steps, samples = steps + 1, samples + len(chosen)
    means = (total / max(1, steps)).tolist()
    found, whole = lanes.unstack(state), _within(state)
    parts = ((params, loss, whole or _within(params)) for params, loss in zip(found, means, strict=True))
    return [Trained(params, loss, finite, steps, samples) for params, loss, finite in parts]


def _within(params: Params) -> bool:
    """Whether all numbers are within `largest`; one that is none is within nothing."""
    ends = torch.stack([end for tensor in params.values() for end in tensor.detach().aminmax()]).tolist()
    limits = (largest(name) for name in params for _ in range(2))
    return all(abs(end) <= limit for end, limit in zip(ends, limits, strict=True))


def _order(jobs: Sequence[Job]) -> Iterator[Tensor]:
    """For each step, int64 (B, n): which samples of the concatenated data each lane sees."""
    task, counts = jobs[0].task, [len(job.y) for job in jobs]
    sizes, first = list(batches(task, counts[0])), torch.tensor([0, *accumulate(counts[:-1])])
    used, generator = sum(sizes), torch.Generator()
    drawn: list[Tensor] = []  # lane by lane, all epochs of each
    for job, count in zip(jobs, counts, strict=True):
        generator.manual_seed(seeds.derive(job.task.seed, "order"))
        drawn += [torch.randperm(count, generator=generator) for _ in range(task.epochs)]
    if any(count != used for count in counts):
        drawn = [order[:used] for order in drawn]
    chosen = torch.stack(drawn).view(len(jobs), task.epochs, used) + first[:, None, None]
    for of_epoch in chosen.permute(1, 2, 0).contiguous():
        yield from torch.split(of_epoch, sizes)


# ---------------------------------------------------------------------------------------------- the objective
Objective = Callable[[Tensor, Tensor], Tensor]
"""A batch (B, n*C, ...) and its targets (B, n, ...) to the loss of each lane (n,)."""


def _objective(
    family: ModelFamily, goal: Task, jobs: Sequence[Job], state: Params, numerics: Numerics, borrowed: ExitStack
) -> Objective:
    """The goal's loss, and whatever the task asks for besides: rows of outputs are (B*n, outputs), the mean over a
    lane's rows is its loss. Good as long as the networks are `borrowed`."""
    task, n, device = jobs[0].task, len(jobs), jobs[0].x.device
    layout = lanes.layout_of(family.layout())
    forward = _student(family, layout, jobs, state, borrowed)
    teachers, fetch = _teachers(family, layout, jobs, state, borrowed)
    seen = Seen()
    if isinstance(forward, Network) and teachers and task.scaler == 1:
        seen = borrowed.enter_context(shared(forward, teachers))
    present = torch.stack([goal.present(job.y) for job in jobs]) if task.mask_labels else None

    def rows(outputs: Tensor) -> Tensor:
        return outputs.float().reshape(len(outputs) * n, -1)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        fetch()
        with numerics.autocast(device):
            out = forward(x)
            with torch.no_grad():
                soft = [rows(_last(teacher(x))).detach() for teacher in teachers]
        seen.clear()
        outputs = tuple(rows(each) for each in out) if isinstance(out, tuple) else (rows(out),)
        if present is not None:
            outputs = tuple(losses.mask_absent(each, present.repeat(len(x), 1)) for each in outputs)
        wanted = y.flatten(0, 1)
        if task.exits is not None:
            e = task.exits
            loss = losses.of_exits(goal, outputs, wanted, e.weights)
            if e.kd_weight > 0 and len(outputs) > 1:
                distil = losses.distil_from_last if e.teachers == "last" else losses.distil_mutually
                loss = loss + e.kd_weight * distil(goal, outputs, e.temperature)
        else:
            loss = goal.loss(outputs[-1], wanted)
            if task.distillation is not None and soft:
                d = task.distillation
                loss = loss + d.weight * losses.self_distillation(goal, outputs[-1], soft, d.temperature)
        return loss.view(len(x), n).T.contiguous().mean(1)  # a row's sum depends on nothing but the row

    return objective


def _last(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[-1] if isinstance(out, tuple) else out


def _student(
    family: ModelFamily, layout: ParamLayout, jobs: Sequence[Job], state: Params, borrowed: ExitStack
) -> lanes.Forward:
    task = jobs[0].task
    if not task.widths:
        network = borrowed.enter_context(_network(family, task))
        network.bind(state, _generators(jobs, "dropout"))
        return network
    return _one_of_widths(family, layout, jobs[0], state, borrowed)


def _generators(jobs: Sequence[Job], purpose: str) -> lanes.Generators:
    device, of = jobs[0].x.device, [job.task.seed for job in jobs]
    return lambda: [torch.Generator(device=device).manual_seed(seeds.derive(seed, purpose)) for seed in of]


NETWORKS_KEPT = 64
_free: dict[object, list[Network]] = {}
"""Networks that nobody uses at the moment, by what they are: building one takes as long as a small step."""


@contextmanager
def _network(family: ModelFamily, task: LocalTask) -> Iterator[Network]:
    """The sub-network `task.spec`, in training, until the context ends."""
    what = (family, family.layout().form(task.spec), task.spec.kept.get(HEAD), task.scaler)
    free = _free.setdefault(what, [])
    try:
        network = free.pop()
    except IndexError:
        network = _built(family, task)
    yield network
    network.release()
    if len(_free) > NETWORKS_KEPT:  # windows that roll: hardly any comes again
        _free.clear()
    _free.setdefault(what, []).append(network)


def _built(family: ModelFamily, task: LocalTask) -> Network:
    """HeteroFL's scaler: every convolution and hidden layer puts out 1/rate times as much."""
    with torch.device("meta"):
        network = Network(family.module(task.spec).train())
    if task.scaler != 1:
        slots = family.layout().slots
        for name, layer in network.weighted.items():
            if slots[f"{name}.weight"].axes[0].group != HEAD:
                layer.register_forward_hook(lambda _, __, out: out / task.scaler)
    return network


def _one_of_widths(
    family: ModelFamily, layout: ParamLayout, job: Job, state: Params, borrowed: ExitStack
) -> lanes.Forward:
    """Ordered dropout (FjORD): each call runs one of the sub-models, drawn uniformly, on slices of the weights; the
    gradient flows into the slices, and is zero elsewhere."""
    task = job.task
    if any(is_statistic(name) for name in state):
        raise ModelError("ordered dropout keeps no running statistics (they differ by width): use norm=batch")
    networks = [borrowed.enter_context(_network(family, replace(task, spec=spec))) for spec in task.widths]
    dropped = [_generators([job], f"width{i}")() for i in range(len(networks))]
    draw = torch.Generator().manual_seed(seeds.derive(task.seed, "widths"))

    def forward(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        i = int(torch.randint(len(networks), (1,), generator=draw))
        weights = take(state, layout, task.widths[i], have=task.spec)
        networks[i].bind(weights, lambda: dropped[i])
        return networks[i](x)

    return forward


def _teachers(
    family: ModelFamily, layout: ParamLayout, jobs: Sequence[Job], state: Params, borrowed: ExitStack
) -> tuple[list[Network], Callable[[], None]]:
    """Sub-networks whose weights are views of the weights in training, so they are current at every step; and what
    fetches the others before a step: on an axis with copies, leading channels do not lie together."""
    task = jobs[0].task
    if task.distillation is None or task.distillation.weight == 0:
        return [], lambda: None
    weights = {name: tensor.detach() for name, tensor in state.items()}
    out, copied = [], list[tuple[SubmodelSpec, Params]]()
    for i, spec in enumerate(task.distillation.teachers):
        # A teacher's forward pass must not write the running statistics of the network in training.
        own = {n: t.clone() if is_statistic(n) else t for n, t in take(weights, layout, spec, have=task.spec).items()}
        apart = {n: t for n, t in own.items() if not is_statistic(n) and not _lies_in(t, state[n])}
        for name in apart:
            if all(axis.copies == 1 for axis in layout.slots[name].axes):
                raise ModelError(f"a teacher must be made of leading channels of the student; in {name} it is not")
        copied.append((spec, apart))
        teacher = borrowed.enter_context(_network(family, replace(task, spec=spec, scaler=1.0)))
        teacher.bind(own, _generators(jobs, f"teacher{i}"))
        out.append(teacher)

    def fetch() -> None:
        for spec, apart in copied:
            if apart:
                now = take({name: weights[name] for name in apart}, layout, spec, have=task.spec)
                for name, tensor in apart.items():
                    tensor.copy_(now[name])

    return out, fetch


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


# --------------------------------------------------------------------------------------------- the step
def _stepper(task: LocalTask, weights: Sequence[Tensor]) -> Callable[[], None]:
    """`torch.optim.SGD` or `Adam` over the weights that have a gradient.

    As functions, with the same kernels: the classes import torch's compiler first, 1.5 s in every pod on a fast core.
    """
    o = task.optimizer
    momenta: dict[int, Tensor | None] = {}
    adam_state: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def step() -> None:
        used = [i for i, w in enumerate(weights) if w.grad is not None]
        moved, gradients = [weights[i] for i in used], [g for w in weights if (g := w.grad) is not None]
        if isinstance(o, SGD):
            buffers = [momenta.get(i) for i in used]
            sgd(
                moved, gradients, buffers, fused=True, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay,
                dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            momenta.update(zip(used, buffers, strict=True))
            return
        for i, w in zip(used, moved, strict=True):
            if i not in adam_state:
                adam_state[i] = torch.zeros_like(w), torch.zeros_like(w), torch.zeros((), device=w.device)
        means, squares, steps = (list(column) for column in zip(*(adam_state[i] for i in used), strict=True))
        adam(
            moved, gradients, means, squares, [], steps, fused=True, lr=o.lr, beta1=0.9, beta2=0.999, eps=1e-8,
            weight_decay=0.0, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def _gradient_terms(jobs: Sequence[Job], state: Params) -> Callable[[], None]:
    """What is added to the gradient after the backward pass: mu * (theta - theta_received) (FedProx), minus the linear
    term (FedDyn); then the norm is clipped."""
    task, device = jobs[0].task, jobs[0].x.device
    mu, limit = task.proximal, task.clip_norm
    trained = {name: t for name, t in state.items() if t.requires_grad}
    received = lanes.stack([job.start for job in jobs], device) if mu > 0 else {}
    linear = lanes.stack([job.linear for job in jobs], device) if jobs[0].linear else {}
    pulled = [(t, received[name]) for name, t in trained.items() if name in received]
    pushed = [(t, linear[name]) for name, t in trained.items() if name in linear]

    def correct() -> None:
        for weight, sent in pulled:
            if weight.grad is not None:
                weight.grad.add_(weight.detach() - sent, alpha=mu)
        for weight, g in pushed:
            if weight.grad is not None:
                weight.grad.sub_(g)
        if limit is not None:
            _clip([t.grad for t in trained.values() if t.grad is not None], limit)

    return correct


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """`torch.nn.utils.clip_grad_norm_`, for each lane by itself."""
    norms_n = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    factors_n = (limit / (norms_n + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factors_n.view(-1, *[1] * (g.dim() - 1)))

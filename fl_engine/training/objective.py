"""The loss of a client's training: the loss of the data's task plus the terms of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import outputs_of
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.task import Task
from fl_engine.core.types import LocalTask, ParamLayout, Params, SubmodelSpec
from fl_engine.training import lanes, losses
from fl_engine.training.lanes import Network, evaluates
from fl_engine.training.networks import lent
from fl_engine.training.numerics import Numerics
from fl_engine.training.shared_layers import Seen, shared

Objective = Callable[[Tensor, Tensor], Tensor]
"""Computes the loss of each lane (n,) from a batch (B, n*C, ...) and its targets (B, n, ...)."""
Streams = dict[str, torch.Generator]
"""The generators that networks draw from, by purpose and lane."""


@dataclass(frozen=True)
class Setting:
    """What the loss of lanes in training depends on."""

    family: ModelFamily
    goal: Task
    tasks: Sequence[LocalTask]
    """One for each lane."""
    targets: Sequence[Tensor]
    """The targets of each lane, on the device that trains."""
    state: Params
    """The weights and statistics in training, (n, ...)."""
    numerics: Numerics
    borrowed: ExitStack
    """The networks are borrowed until it is closed."""
    streams: Streams = field(default_factory=dict)
    """Receives the generators that the networks draw from."""

    @property
    def device(self) -> torch.device:
        return self.targets[0].device

    def lent(self, task: LocalTask) -> Network:
        return self.borrowed.enter_context(lent(self.family, task))

    def generators(self, purpose: str) -> lanes.Generators:
        """A function that makes a generator for each lane and stores it in `streams`."""

        def made() -> list[torch.Generator]:
            names = [f"{purpose}/{lane}" for lane in range(len(self.tasks))]
            for name, task in zip(names, self.tasks, strict=True):
                seed = seeds.derive(task.seed, purpose)
                self.streams[name] = torch.Generator(device=self.device).manual_seed(seed)
            return [self.streams[name] for name in names]

        return made


def objective_of(setting: Setting) -> Objective:
    """The loss of the data's task plus the terms of the client's task.

    Outputs are reshaped to rows, (B*n, outputs), (B*n, outputs, H, W) or (B*n, outputs, T); a lane's loss is the mean
    over its rows.
    """
    goal, task, n, device = setting.goal, setting.tasks[0], len(setting.tasks), setting.device
    layout = lanes.stacked_layout(setting.family.layout())
    forward: lanes.Forward
    if task.widths:
        forward = _one_of_widths(setting, layout)
    else:
        forward = setting.lent(task)
        forward.bind(setting.state, setting.generators("dropout"))
    teachers, fetch = _teachers(setting, layout)
    seen = Seen()
    if isinstance(forward, Network) and teachers and task.scaler == 1:
        seen = setting.borrowed.enter_context(shared(forward, teachers))
    present = torch.stack([goal.present(y) for y in setting.targets]) if task.mask_labels else None

    def rows(outputs: Tensor) -> Tensor:
        return outputs.float().reshape(len(outputs) * n, -1, *outputs.shape[2:])

    def objective(x: Tensor, y: Tensor) -> Tensor:
        fetch()
        with setting.numerics.autocast(device):
            out = forward(x)
            with torch.no_grad():
                soft = [rows(outputs_of(teacher(x))[-1]).detach() for teacher in teachers]
        seen.clear()
        outputs = tuple(rows(each) for each in outputs_of(out))
        if present is not None:
            held = present.repeat(len(x), 1)
            outputs = tuple(losses.mask_absent(each, held) for each in outputs)
            soft = [losses.mask_absent(each, held) for each in soft]
        wanted = y.flatten(0, 1)
        if task.sandwich is not None:
            loss = losses.of_sandwich(goal, outputs, wanted, task.sandwich.weight, task.sandwich.temperature)
        elif task.exits is not None:
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
        return loss.view(len(x), n).T.contiguous().mean(1)  # one row per lane: its sum does not depend on n

    return objective


def _one_of_widths(setting: Setting, layout: ParamLayout) -> lanes.Forward:
    """Ordered dropout (FjORD): each call runs one of the sub-models, drawn uniformly, on slices of the weights. The
    gradient is zero outside of the slices."""
    task, state = setting.tasks[0], setting.state
    if task.sandwich is None and any(is_statistic(name) for name in state):
        raise ModelError("ordered dropout needs model.norm=batch, because running statistics differ by width")
    networks = [setting.lent(replace(task, spec=spec)) for spec in task.widths]
    dropped = [setting.generators(f"width{i}")() for i in range(len(networks))]
    draw = setting.streams["widths/0"] = torch.Generator().manual_seed(seeds.derive(task.seed, "widths"))

    def run(i: int, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        weights = take(state, layout, task.widths[i], have=task.spec)
        if i < len(networks) - 1:  # the running statistics are the largest sub-model's
            weights = {name: t.clone() if is_statistic(name) else t for name, t in weights.items()}
        networks[i].bind(weights, lambda: dropped[i])
        return networks[i](x)

    def forward(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if task.sandwich is None:
            return run(int(torch.randint(len(networks), (1,), generator=draw)), x)
        return tuple(outputs_of(run(i, x))[-1] for i in _in_sandwich(len(networks), task.sandwich.random, draw))

    return forward


def _in_sandwich(count: int, random: int, draw: torch.Generator) -> list[int]:
    """The sub-models that a step trains, ascending: the first, `random` ones between, and the last."""
    between = torch.randperm(max(0, count - 2), generator=draw)[:random] + 1
    return sorted({0, *between.tolist(), count - 1})


def _teachers(setting: Setting, layout: ParamLayout) -> tuple[list[Network], Callable[[], None]]:
    """The teachers, whose weights are views of the student's, and a function to call before each step, which updates
    the weights that cannot be views: on an axis with copies or of several groups, leading channels are not
    contiguous."""
    task, state = setting.tasks[0], setting.state
    if task.distillation is None or task.distillation.weight == 0:
        return [], lambda: None
    weights = {name: tensor.detach() for name, tensor in state.items()}
    out, copied = [], list[tuple[SubmodelSpec, Params]]()
    for i, spec in enumerate(task.distillation.teachers):
        # A teacher's forward pass must not write the running statistics of the network in training.
        own = {n: t.clone() if is_statistic(n) else t for n, t in take(weights, layout, spec, have=task.spec).items()}
        apart = {n: t for n, t in own.items() if not is_statistic(n) and not _lies_in(t, state[n])}
        for name in apart:
            if all(axis.copies == 1 and axis.then is None for axis in layout.slots[name].axes):
                raise ModelError(f"a teacher must be made of leading channels of the student; in {name} it is not")
        copied.append((spec, apart))
        teacher = setting.lent(replace(task, spec=spec, scaler=1.0))
        teacher.bind(own, setting.generators(f"teacher{i}"))
        if not task.distillation.training:
            evaluates(teacher)
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

"""The loss of a client's training: that of the data's task, with the terms of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

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


def objective_of(
    family: ModelFamily,
    goal: Task,
    tasks: Sequence[LocalTask],
    targets: Sequence[Tensor],
    state: Params,
    numerics: Numerics,
    streams: Streams,
    borrowed: ExitStack,
) -> Objective:
    """The loss of the data's task (`goal`) plus the terms of the client's task.

    Outputs are reshaped to rows, (B*n, outputs), (B*n, outputs, H, W) or (B*n, outputs, T); a lane's loss is the mean
    over its rows. The function is valid as long as the networks are `borrowed`.

    Args:
        tasks: One for each lane.
        targets: The targets of each lane, on the device that trains.
        streams: Receives the generators that the networks draw from.
    """
    task, n, device = tasks[0], len(tasks), targets[0].device
    layout = lanes.stacked_layout(family.layout())
    forward = _student(family, layout, tasks, device, state, streams, borrowed)
    teachers, fetch = _teachers(family, layout, tasks, device, state, streams, borrowed)
    seen = Seen()
    if isinstance(forward, Network) and teachers and task.scaler == 1:
        seen = borrowed.enter_context(shared(forward, teachers))
    present = torch.stack([goal.present(y) for y in targets]) if task.mask_labels else None

    def rows(outputs: Tensor) -> Tensor:
        return outputs.float().reshape(len(outputs) * n, -1, *outputs.shape[2:])

    def objective(x: Tensor, y: Tensor) -> Tensor:
        fetch()
        with numerics.autocast(device):
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


def _student(
    family: ModelFamily,
    layout: ParamLayout,
    tasks: Sequence[LocalTask],
    device: torch.device,
    state: Params,
    streams: Streams,
    borrowed: ExitStack,
) -> lanes.Forward:
    task = tasks[0]
    if not task.widths:
        network = borrowed.enter_context(lent(family, task))
        network.bind(state, generators(tasks, device, "dropout", streams))
        return network
    return _one_of_widths(family, layout, task, device, state, streams, borrowed)


def generators(tasks: Sequence[LocalTask], device: torch.device, purpose: str, streams: Streams) -> lanes.Generators:
    """A function that makes a generator for each lane and stores it in `streams`."""

    def made() -> list[torch.Generator]:
        for lane, task in enumerate(tasks):
            seed = seeds.derive(task.seed, purpose)
            streams[f"{purpose}/{lane}"] = torch.Generator(device=device).manual_seed(seed)
        return [streams[f"{purpose}/{lane}"] for lane in range(len(tasks))]

    return made


def _one_of_widths(
    family: ModelFamily,
    layout: ParamLayout,
    task: LocalTask,
    device: torch.device,
    state: Params,
    streams: Streams,
    borrowed: ExitStack,
) -> lanes.Forward:
    """Ordered dropout (FjORD): each call runs one of the sub-models, drawn uniformly, on slices of the weights. The
    gradient is zero outside of the slices."""
    if task.sandwich is None and any(is_statistic(name) for name in state):
        raise ModelError("ordered dropout needs model.norm=batch, because running statistics differ by width")
    networks = [borrowed.enter_context(lent(family, replace(task, spec=spec))) for spec in task.widths]
    dropped = [generators([task], device, f"width{i}", streams)() for i in range(len(networks))]
    draw = streams["widths/0"] = torch.Generator().manual_seed(seeds.derive(task.seed, "widths"))

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


def _teachers(
    family: ModelFamily,
    layout: ParamLayout,
    tasks: Sequence[LocalTask],
    device: torch.device,
    state: Params,
    streams: Streams,
    borrowed: ExitStack,
) -> tuple[list[Network], Callable[[], None]]:
    """The teachers, whose weights are views of the student's, and a function to call before each step, which updates
    the weights that cannot be views: on an axis with copies or of several groups, leading channels are not
    contiguous."""
    task = tasks[0]
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
        teacher = borrowed.enter_context(lent(family, replace(task, spec=spec, scaler=1.0)))
        teacher.bind(own, generators(tasks, device, f"teacher{i}", streams))
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

"""Builds the loss that a client minimises: the task's loss plus the algorithm's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import outputs_of
from fl_engine.core.slicing import blank, is_statistic, take
from fl_engine.core.task import Task, has
from fl_engine.core.types import HEAD, LocalTask, ParamLayout, Params, SubmodelSpec
from fl_engine.training import lanes, losses
from fl_engine.training.lanes import LaneNetwork
from fl_engine.training.numerics import Numerics

Objective = Callable[[Tensor, Tensor], Tensor]
"""Function that computes the loss of each lane (n,) from a batch (B, n*C, ...) and its targets (B, n, ...)."""

MOST_NETWORKS = 64
_free: dict[object, list[LaneNetwork]] = {}
"""Cache of unused networks, because building a network takes as long as several small steps. Keys contain the sub-model
and the scaler."""


@dataclass(frozen=True)
class Setting:
    """Input for the training loss of several lanes."""

    family: ModelFamily
    goal: Task
    tasks: Sequence[LocalTask]
    """One task per lane."""
    targets: Sequence[Tensor]
    """Targets of each lane, on the torch device for training."""
    state: Params
    """Trained weights and running statistics, each (n, ...)."""
    numerics: Numerics
    borrowed: ExitStack
    """Exit stack that returns the borrowed networks to the cache."""
    streams: dict[str, torch.Generator] = field(default_factory=dict)
    """Random generators of the networks. A key is `<purpose>/<lane>`."""

    @property
    def device(self) -> torch.device:
        return self.targets[0].device

    def borrow(self, task: LocalTask) -> LaneNetwork:
        """Return a network in training mode for the sub-model `task.spec`, from the cache if possible."""
        what = (self.family, self.family.layout().form(task.spec), task.spec.kept.get(HEAD), task.scaler)
        try:
            network = _free.setdefault(what, []).pop()
        except IndexError:
            with torch.device("meta"):
                network = LaneNetwork(blank(self.family, task.spec).train())
            divide_outputs(self.family, task, network.weighted)
        self.borrowed.callback(_give_back, what, network)
        return network

    def generators(self, purpose: str) -> list[torch.Generator]:
        """Create a generator for each lane, and store it in `streams`."""
        names = [f"{purpose}/{lane}" for lane in range(len(self.tasks))]
        for name, task in zip(names, self.tasks, strict=True):
            seed = seeds.derive(task.seed, purpose)
            self.streams[name] = torch.Generator(device=self.device).manual_seed(seed)
        return [self.streams[name] for name in names]


def _give_back(what: object, network: LaneNetwork) -> None:
    network.release()
    if not network.module.training:
        network.module.train()
    if len(_free) > MOST_NETWORKS:  # Limit the cache, because FedRolex's rolling windows rarely repeat a sub-model.
        _free.clear()
    _free.setdefault(what, []).append(network)


def divide_outputs(family: ModelFamily, task: LocalTask, weighted: Mapping[str, nn.Module]) -> None:
    """Apply HeteroFL's scaler: divide the outputs of every convolution and hidden linear layer by a divisor. With
    `by_layer`, the divisor is the fraction of the layer's outputs in the sub-model. Otherwise, the divisor is
    `task.scaler`. LSTMs, and outputs that are never sliced, are not scaled."""
    if task.scaler == 1:
        return
    layout = family.layout()
    for name, layer in weighted.items():
        slot = layout.slots.get(f"{name}.weight")
        if slot is None:  # The layer is frozen.
            continue
        outputs = slot.axes[1] if isinstance(layer, _ConvTransposeNd) else slot.axes[0]
        if outputs.group == HEAD or all(part.group is None for part in outputs.parts):
            continue
        rate = task.scaler
        if rate == "by_layer":
            kept = outputs.length(0, partial(layout.width, task.spec))
            rate = kept / outputs.length(0, layout.groups.__getitem__)
        if rate != 1:
            layer.register_forward_hook(lambda _, __, out, rate=rate: out / rate)


def objective_of(setting: Setting) -> Objective:
    """Return a function that computes the task's loss on the data plus the terms that the client's `LocalTask` sets.

    Outputs are reshaped to rows: (B*n, outputs), (B*n, outputs, H, W) or (B*n, outputs, T). The loss of a lane is the
    mean over the lane's rows.
    """
    goal, task, n = setting.goal, setting.tasks[0], len(setting.tasks)
    layout = lanes.stacked_layout(setting.family.layout())
    forward: lanes.Forward
    if task.widths:
        forward = _one_of_widths(setting, layout)
    else:
        forward = setting.borrow(task)
        forward.bind(setting.state, partial(setting.generators, "dropout"))
    teachers, update_teachers = _teachers(setting, layout)
    masks = [goal.present(y) for y in setting.targets] if task.mask_labels else []
    present = torch.stack(found) if (found := [mask for mask in masks if mask is not None]) else None

    def rows(outputs: Tensor) -> Tensor:
        return outputs.float().reshape(len(outputs) * n, -1, *outputs.shape[2:])

    def by_lane(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        parts = [[p.contiguous() for p in t.view(-1, n, *t.shape[1:]).unbind(1)] for t in tensors]
        return [[part[i] for part in parts] for i in range(n)]

    def losses_of_rows(
        outputs: Sequence[Tensor], soft: Sequence[Tensor], held: Sequence[Tensor], wanted: Tensor
    ) -> Tensor:
        if held:
            outputs = [losses.mask_absent(each, held[0]) for each in outputs]
            soft = [losses.mask_absent(each, held[0]) for each in soft]
        if task.sandwich is not None:
            return losses.of_sandwich(goal, outputs, wanted, task.sandwich.weight, task.sandwich.temperature)
        if task.exits is not None:
            e = task.exits
            loss = losses.of_exits(goal, outputs, wanted, e.weights)
            if e.kd_weight > 0 and len(outputs) > 1:
                distil = losses.distil_from_last if e.teachers == "last" else losses.distil_mutually
                loss = loss + e.kd_weight * distil(goal, outputs, e.temperature)
            return loss
        loss = goal.loss(outputs[-1], wanted)
        if task.distillation is not None and soft:
            d = task.distillation
            loss = loss + d.weight * losses.self_distillation(goal, outputs[-1], soft, d.temperature, d.reduction)
        return loss

    def objective(x: Tensor, y: Tensor) -> Tensor:
        update_teachers()
        with setting.numerics.autocast(setting.device):
            out = forward(x)
            with torch.no_grad():
                soft = [rows(outputs_of(teacher(x))[-1]).detach() for teacher in teachers]
        outputs = tuple(rows(each) for each in outputs_of(out))
        held = [] if present is None else [present.repeat(len(x), 1)]
        if has(goal, "rowwise") or n == 1:
            loss = losses_of_rows(outputs, soft, held, y.flatten(0, 1)).view(len(x), n).T
        else:
            arguments = zip(by_lane(outputs), by_lane(soft), by_lane(held), y.unbind(1), strict=True)
            loss = torch.stack([losses_of_rows(o, s, h, wanted.contiguous()) for o, s, h, wanted in arguments])
        return loss.contiguous().mean(1)  # Without contiguous(), sums would round differently.

    return objective


def _one_of_widths(setting: Setting, layout: ParamLayout) -> lanes.Forward:
    """Return a forward function with ordered dropout (FjORD). Each call draws a sub-model uniformly and runs it on
    slices of the weights, outside which the gradient is 0. With `sandwich`, each call runs several sub-models."""
    task, state = setting.tasks[0], setting.state
    if task.sandwich is None and any(is_statistic(name) for name in state):
        raise ModelError(
            "the network must not store running statistics, because the statistics differ between widths. Set "
            "model.norm=batch, or set track_running_stats=False in your own network",
            path="model.norm",
        )
    networks = [setting.borrow(replace(task, spec=spec)) for spec in task.widths]
    dropped = [setting.generators(f"width{i}") for i in range(len(networks))]
    draw = setting.streams["widths/0"] = torch.Generator().manual_seed(seeds.derive(task.seed, "widths"))

    def run(i: int, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        weights = take(state, layout, task.widths[i], have=task.spec)
        if i < len(networks) - 1:  # Only the largest sub-model updates the running statistics.
            weights = {name: t.clone() if is_statistic(name) else t for name, t in weights.items()}
        networks[i].bind(weights, lambda: dropped[i])
        return networks[i](x)

    def forward(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if task.sandwich is None:
            return run(int(torch.randint(len(networks), (1,), generator=draw)), x)
        last = len(networks) - 1
        between = torch.randperm(max(0, last - 1), generator=draw)[: task.sandwich.random] + 1
        return tuple(outputs_of(run(i, x))[-1] for i in sorted({0, *between.tolist(), last}))

    return forward


def _teachers(setting: Setting, layout: ParamLayout) -> tuple[list[LaneNetwork], Callable[[], None]]:
    """Build the teachers, and return them and a function `update`. Most weights of a teacher are views of the student's
    weights. If an axis has copies or several groups, its leading channels are not contiguous, so the teacher stores a
    copy of the weights. Call `update` before each step to refresh the teachers' copies."""
    task, state = setting.tasks[0], setting.state
    if task.distillation is None or task.distillation.weight == 0:
        return [], lambda: None
    weights = {name: tensor.detach() for name, tensor in state.items()}
    out, copied = [], list[tuple[SubmodelSpec, Params]]()
    for i, spec in enumerate(task.distillation.teachers):
        # The forward pass of a teacher must not change the student's running statistics.
        own = {n: t.clone() if is_statistic(n) else t for n, t in take(weights, layout, spec, have=task.spec).items()}
        apart = {n: t for n, t in own.items() if not is_statistic(n) and not _is_view(t, state[n])}
        for name in apart:
            if all(axis.copies == 1 and axis.then is None for axis in layout.slots[name].axes):
                raise ModelError(f"a teacher must use its student's first channels, but {name} uses other channels")
        copied.append((spec, apart))
        teacher = setting.borrow(replace(task, spec=spec, scaler=1.0))
        teacher.bind(own, partial(setting.generators, f"teacher{i}"))
        if not task.distillation.training:
            lanes.set_evaluation(teacher)
        out.append(teacher)

    def update() -> None:
        for spec, apart in copied:
            if apart:
                now = take({name: weights[name] for name in apart}, layout, spec, have=task.spec)
                for name, tensor in apart.items():
                    tensor.copy_(now[name])

    return out, update


def _is_view(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()

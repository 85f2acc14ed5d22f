"""Early exits: classifiers on the way, as DepthFL (Kim et al., ICLR 2023) and ScaleFL (Ilhan et al., CVPR 2023) train.

A family with `exits=("conv2", ...)` has behind each of these blocks a head: global average pool where the block
gives a map, then one linear layer. A head is a block of its own, `exit_conv2` (`exit_stage1_0` for `stage1.0`), with
the parameters `exit_conv2.weight` (classes, channels) and `exit_conv2.bias` (classes,); in the layout it follows
its block. The network gives a tuple of logits, one per output kept, in network order.

A sub-model may end at any exit and leave out any head: `layers.check_spec` has the rule,
`widths.up_to` lists the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import HEAD, Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.models.layers import linear_slots
from fl_engine.training import lanes


def check_exits(name: str, exits: tuple[str, ...], points: tuple[str, ...]) -> None:
    """Raises ModelError unless `exits` are some of `points`, the blocks behind which one may sit, in their order."""
    if not isinstance(exits, tuple) or not all(isinstance(block, str) for block in exits):
        raise ModelError(f"{name}: exits is a tuple of names of blocks, got {exits!r}")
    unknown = [block for block in exits if block not in points]
    if unknown:
        raise ModelError(f"{name}: no exit can sit behind {unknown[0]!r}, only behind {', '.join(points)}")
    ordered = tuple(block for block in points if block in exits)
    if exits != ordered:
        raise ModelError(f"{name}: exits are distinct and in network order, {ordered!r}; got {exits!r}")


def slots_with_exits(slots: Mapping[str, Slot], exits: tuple[str, ...]) -> dict[str, Slot]:
    """The slots of the trunk, and behind those of each block in `exits` the slots of its head."""
    out: dict[str, Slot] = {}
    for block, parts in groupby(slots.items(), key=lambda item: item[1].block):
        out |= parts
        if block in exits:
            # In each network the last parameter of a block has the block's output as its first axis.
            channels = next(reversed(out.values())).axes[0]
            out |= linear_slots(exit_name(block), exit_name(block), channels, Axis(HEAD))
    return out


def assemble(
    layers: OrderedDict[str, nn.Module], layout: ParamLayout, spec: SubmodelSpec, exits: tuple[str, ...]
) -> nn.Module:
    """The network of these layers, in order; with exits, the heads put in and what lies behind the last output left
    out. A layer is a block, a container of the blocks `<layer>.<...>`, or no block at all (a pool, a flatten)."""
    return WithExits(layers, layout, spec, exits) if exits else nn.Sequential(layers)


class ExitHead(nn.Linear):
    """Map (B, C, H, W) or vector (B, C) -> logits (B, kept classes)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_pooled(input))

    def in_lanes(self) -> nn.Module:
        return _ExitLanes()


class _ExitLanes(lanes.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_pooled(input))


def _pooled(x: Tensor) -> Tensor:
    return lanes.mean_of_pixels(x).flatten(1) if x.dim() == 4 else x


class WithExits(nn.Module):
    """(B, C, H, W) -> logits (B, kept classes) of each output kept, in network order."""

    def __init__(
        self, layers: Mapping[str, nn.Module], layout: ParamLayout, spec: SubmodelSpec, exits: tuple[str, ...]
    ) -> None:
        super().__init__()
        heads = [exit_name(block) for block in exits]
        steps = [s for s in _steps(layers, layout, exits) if s not in layout.blocks or layout.has_block(spec, s)]
        if not layout.has_block(spec, layout.blocks[-1]):
            end = max(place for place, step in enumerate(steps) if step in heads)
            steps = steps[: end + 1]
        for step in steps:
            if step in heads:
                groups = [axis.group for axis in layout.slots[f"{step}.weight"].axes]
                classes, channels = (layout.width(spec, group) for group in groups if group is not None)
                self.add_module(step, ExitHead(channels, classes))
            else:
                layer = step.partition(".")[0]
                self.add_module(layer, layers[layer])
        self.steps = tuple(steps)
        self.heads = frozenset(heads)
        self.order = tuple(name for name, slot in layout.slots.items() if layout.has_block(spec, slot.block))
        self.register_state_dict_post_hook(_in_network_order)  # type: ignore[no-untyped-call]

    def forward(self, x_bchw: Tensor) -> tuple[Tensor, ...]:
        x, logits = x_bchw, []
        for step in self.steps:
            unit = self.get_submodule(step)
            if step in self.heads:
                logits.append(unit(x))
            else:
                x = unit(x)
        return tuple(logits) if self.steps[-1] in self.heads else (*logits, x)


def _steps(layers: Iterable[str], layout: ParamLayout, exits: tuple[str, ...]) -> Iterator[str]:
    """What the full network runs one after the other: blocks (those inside a container, too), heads, and the rest."""
    for name in layers:
        for step in [block for block in layout.blocks if block.startswith(f"{name}.")] or [name]:
            yield step
            if step in exits:
                yield exit_name(step)


def _in_network_order(module: WithExits, state: dict[str, Any], prefix: str, _: object) -> None:
    """A head between two blocks of a stage is no child of the stage, so PyTorch lists it behind the whole stage."""
    for name in module.order:
        state[prefix + name] = state.pop(prefix + name)

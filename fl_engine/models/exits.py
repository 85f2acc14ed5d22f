"""Early exits: classifiers behind inner blocks, as in DepthFL (Kim et al., ICLR 2023) and ScaleFL (Ilhan et al., CVPR
2023).

A network with `exits=("conv2", ...)` has a head behind each of these blocks: global average pooling if the block
returns a map, then one linear layer. A head is a block of its own, `exit_conv2` (`exit_stage1_0` for `stage1.0`), with
the parameters `exit_conv2.weight` (classes, channels) and `exit_conv2.bias` (classes,). In the layout it follows its
block. The network returns a tuple of logits, one entry for each output kept, in network order.

With `exit_convs=(("conv2", 2), ...)`, two 3x3 convolutions of stride 1, each with batch norm and ReLU, come before the
pooling of that head. They have the channels of the block, as one group. The head's parameters are then
`exit_conv2.conv1.conv.weight`, `exit_conv2.conv1.bn.weight`, ..., `exit_conv2.linear.weight`, `exit_conv2.linear.bias`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import HEAD, Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.models.layers import Norm, conv_bn, conv_bn_slots, linear_slots
from fl_engine.training import lanes

Convs = tuple[tuple[str, int], ...]
"""Pairs of a block and the number of convolutions in the head behind it. Heads of other blocks have none."""

MOST_CONVS = 8


def check_exits(name: str, exits: tuple[str, ...], points: tuple[str, ...], convs: Convs = ()) -> None:
    """Raise ModelError unless `exits` are some of the blocks `points`, in their order, and `convs` fits them."""
    if exits != tuple(block for block in points if block in exits):
        raise ModelError(f"{name}: exits must be some of {', '.join(points)}, in this order, got {exits!r}")
    if any(block not in points or not 0 <= count <= MOST_CONVS for block, count in convs):
        raise ModelError(
            f"{name}: exit_convs must be pairs of one of {', '.join(points)} and a number from 0 to {MOST_CONVS}, got "
            f"{convs!r}"
        )
    if len(dict(convs)) != len(convs):
        raise ModelError(f"{name}: exit_convs must contain a block only once, got {convs!r}")


def check_spec(
    layout: ParamLayout, spec: SubmodelSpec, skippable: Collection[str] = (), exits: Collection[str] = ()
) -> None:
    """Raise ModelError if `spec` contains something that does not exist, or drops a block that the network needs.

    A block with an identity shortcut around it is skippable. With early exits, a sub-model may drop any output (also
    the classifier's) as long as one stays. It must drop all blocks behind the last output that it keeps.
    """
    layout.check(spec)
    blocks = layout.blocks
    heads = [exit_name(block) for block in exits]
    outputs = [*heads, blocks[-1]]
    kept = [block for block in outputs if layout.has_block(spec, block)]
    if heads and not kept:
        raise ModelError(f"the sub-model must keep at least one of the outputs {', '.join(outputs)}")
    last = kept[-1] if kept else blocks[-1]
    end = blocks.index(last)
    free = {*skippable, *heads}
    if dropped := [block for block in blocks[: end + 1] if not layout.has_block(spec, block) and block not in free]:
        raise ModelError(f"the sub-model must keep block {dropped[0]!r}, which its output {last!r} needs")
    if idle := [block for block in blocks[end + 1 :] if layout.has_block(spec, block)]:
        raise ModelError(f"the sub-model must drop block {idle[0]!r}, which lies behind its last output {last!r}")


def slots_with_exits(
    slots: Mapping[str, Slot], exits: tuple[str, ...], convs: Convs = (), norm: Norm = "batch"
) -> dict[str, Slot]:
    """The slots of the trunk, with each head's slots inserted behind those of its block. Raises ModelError if `convs`
    gives convolutions to a head whose input is a vector."""
    out: dict[str, Slot] = {}
    for block, found in groupby(slots.items(), key=lambda item: item[1].block):
        parts = dict(found)
        out |= parts
        if block in exits:
            # In each network the last parameter of a block has the block's output as its first axis.
            channels, head = next(reversed(parts.values())).axes[0], exit_name(block)
            count = dict(convs).get(block, 0)
            if count and not any(len(slot.axes) == 4 for slot in parts.values()):
                raise ModelError(
                    f"exit_convs must be 0 for {block!r}, whose exit takes a vector, not a map; got {count}"
                )
            for i in range(1, count + 1):
                out |= conv_bn_slots(f"{head}.conv{i}", head, channels, channels, norm, bias=False)
            out |= linear_slots(f"{head}.linear" if count else head, head, channels, Axis(HEAD))
    return out


def assemble(
    layers: OrderedDict[str, nn.Module], layout: ParamLayout, spec: SubmodelSpec, exits: tuple[str, ...]
) -> nn.Module:
    """The network of these layers, in order. With exits, the heads are inserted, and layers behind the last output are
    left out. A layer is a block, a container of the blocks `<layer>.<...>`, or not a block (a pool, a flatten)."""
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
                self.add_module(step, _head(step, layout, spec))
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


def _head(block: str, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
    own = [name for name, slot in layout.slots.items() if slot.block == block]
    convs = [name.removesuffix(".conv.weight").rpartition(".")[2] for name in own if name.endswith(".conv.weight")]
    axes = layout.slots[f"{block}.linear.weight" if convs else f"{block}.weight"].axes
    classes, channels = (layout.width(spec, axis.group) * axis.each for axis in axes if axis.group is not None)
    linear = ExitHead(channels, classes)
    if not convs:
        return linear
    norm: Norm = "static" if any(map(is_statistic, own)) else "batch"
    units = {name: conv_bn(channels, channels, 3, norm, bias=False, relu=nn.ReLU()) for name in convs}
    return nn.Sequential(OrderedDict[str, nn.Module](units, linear=linear))


def _steps(layers: Iterable[str], layout: ParamLayout, exits: tuple[str, ...]) -> Iterator[str]:
    """The names of the full network's steps in order: blocks (also inside a container), heads, other layers."""
    for name in layers:
        for step in [block for block in layout.blocks if block.startswith(f"{name}.")] or [name]:
            yield step
            if step in exits:
                yield exit_name(step)


def _in_network_order(module: WithExits, state: dict[str, Any], prefix: str, _: object) -> None:
    """Sort the state. PyTorch lists a head between two blocks of a stage behind the stage, whose child it is not."""
    for name in module.order:
        state[prefix + name] = state.pop(prefix + name)

"""Early exits: classifiers after intermediate blocks (DepthFL, Kim et al., ICLR 2023; ScaleFL, Ilhan et al., CVPR
2023).

With `exits=("conv2", ...)`, a head follows each of the listed blocks. A head is a linear layer, preceded by global
average pooling if the block returns a map. The head of `conv2` is a separate block `exit_conv2` with the parameters
`exit_conv2.weight` (classes, channels) and `exit_conv2.bias` (classes,); the head of `stage1.0` is `exit_stage1_0`. In
the layout, each head follows its block. A sub-model returns a tuple with the logits of each output that the sub-model
keeps, in network order.

With `exit_convs=(("conv2", 2), ...)`, the head of `conv2` also has two 3x3 convolutions with stride 1, batch norm and
ReLU before the pooling. The convolutions share the block's channel group. The parameters of the head are then
`exit_conv2.conv1.conv.weight`, `exit_conv2.conv1.bn.weight`, ..., `exit_conv2.linear.weight`, `exit_conv2.linear.bias`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import HEAD, Axis, ParamLayout, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.models.layers import LayerMaker, Norm, noted
from fl_engine.training import lanes

Convs = tuple[tuple[str, int], ...]
"""Pairs (block, number of convolutions in the block's head). The heads of all other blocks have no convolutions."""

MOST_CONVS = 8


def check_spec(
    layout: ParamLayout, spec: SubmodelSpec, skippable: Collection[str] = (), exits: Collection[str] = ()
) -> None:
    """Raise ModelError if `spec` contains unknown groups or blocks, or drops a block that the network requires.

    A sub-model may drop blocks with an identity shortcut. A sub-model of a network with early exits must keep at least
    one output: the classifier or the head of an early exit. All blocks after the last kept output must be dropped.
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
        raise ModelError(f"the sub-model must keep block {dropped[0]!r}, because output {last!r} depends on this block")
    if idle := [block for block in blocks[end + 1 :] if layout.has_block(spec, block)]:
        raise ModelError(f"the sub-model must drop block {idle[0]!r}, because it follows the last output {last!r}")


class ExitHead(nn.Linear):
    """Classifier of an early exit; maps (B, C, H, W) or (B, C) to logits (B, kept classes)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_pooled(input))

    def in_lanes(self) -> nn.Module:
        return _ExitLanes()


class _ExitLanes(lanes.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_pooled(input))


def _pooled(x: Tensor) -> Tensor:
    return lanes.mean_of_pixels(x).flatten(1) if x.dim() == 4 else x


def exit_head(make: LayerMaker, channels: Axis, convs: int, norm: Norm) -> nn.Module:
    """Return the head of an early exit. `channels` is the axis of the block's output channels."""
    classes = Axis(HEAD)
    linear = noted(ExitHead(make.width(channels), make.width(classes)), weight=(classes, channels), bias=(classes,))
    if not convs:
        return linear
    units = {
        f"conv{i}": make.conv_bn(channels, channels, 3, norm, bias=False, relu=nn.ReLU()) for i in range(1, convs + 1)
    }
    return nn.Sequential(OrderedDict[str, nn.Module](units, linear=linear))


class WithExits(nn.Module):
    """Network with early exits; maps (B, C, H, W) to a tuple with the logits (B, kept classes) of each kept output.

    The constructor inserts the heads between the layers and omits layers after the last output. A layer is a block, a
    container of blocks called `<layer>.<...>`, or a layer without weights, such as a pool.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], heads: Mapping[str, nn.Module], points: Sequence[str], make: LayerMaker
    ) -> None:
        """`heads` maps blocks to the heads that the sub-model keeps. `points` lists all blocks that may have a head."""
        super().__init__()
        weighted = [name for name, layer in layers.items() if any(True for _ in layer.parameters())]
        named = {exit_name(block): head for block, head in heads.items()}
        steps: list[str] = []
        for name, layer in layers.items():
            self.add_module(name, layer)
            for step in [block for block in points if block.startswith(f"{name}.")] or [name]:
                is_block = step != name or name in weighted
                if not is_block or make.has_block(step):
                    steps.append(step)
                if step in heads:
                    if step == name:
                        _check_map(step, layer, heads[step])
                    steps.append(exit_name(step))
                    self.add_module(exit_name(step), heads[step])
        if not make.has_block(weighted[-1]):
            end = max(index for index, step in enumerate(steps) if step in named)
            steps = steps[: end + 1]
        for name in layers.keys() - {step.partition(".")[0] for step in steps}:
            delattr(self, name)
        self.steps = tuple(steps)
        self.heads = frozenset(named)
        self.order = tuple(f"{step}.{name}" for step in steps for name in self.get_submodule(step).state_dict())
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


def _check_map(block: str, layer: nn.Module, head: nn.Module) -> None:
    """Raise ModelError if a head has convolutions but the block returns a vector instead of a map."""
    if isinstance(head, nn.Sequential) and not any(each.dim() == 4 for each in layer.parameters()):
        message = f"exit_convs must be 0 for {block!r}, whose exit takes a vector, not a map; got {len(head) - 1}"
        raise ModelError(message, path="model.exit_convs")


def _in_network_order(module: WithExits, state: dict[str, Any], prefix: str, _: object) -> None:
    """Sort the state dict in network order, because PyTorch lists a head after all blocks of the head's stage."""
    for name in module.order:
        state[prefix + name] = state.pop(prefix + name)

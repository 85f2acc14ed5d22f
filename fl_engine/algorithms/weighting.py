"""How much a client counts in the mean: the option `weighting`."""

from __future__ import annotations

from typing import Literal

from fl_engine.core.types import HEAD, ParamLayout, Params

Weighting = Literal["examples", "uniform", "model_size", "updates", "hybrid"]


def counted(weighting: Weighting, layout: ParamLayout, payload: Params, examples: int, steps: float) -> float:
    """Return the weight of a client that trained `payload` on so many samples in so many steps."""
    match weighting:
        case "examples":
            return examples
        case "uniform":
            return 1.0
        case "model_size":
            return kernels(layout, payload)
        case "updates":
            return steps
        case "hybrid":
            return kernels(layout, payload) * steps


def kernels(layout: ParamLayout, params: Params) -> int:
    """Return the output channels of all layers but the output layer; at least 1."""
    return max(1, sum(_outputs(layout, params, name) for name, tensor in params.items() if tensor.dim() > 1))


def _outputs(layout: ParamLayout, params: Params, name: str) -> int:
    """Return the output channels of a layer: the length of its bias. The outputs of an embedding are its last axis,
    because no sub-model cuts its words."""
    axes = layout.slots[name].axes
    if HEAD in (axes[0].group, axes[-1].group):
        return 0
    if (bias := params.get(f"{name.removesuffix('weight')}bias")) is not None:
        return bias.numel()
    return params[name].shape[0 if axes[0].group is not None else -1]

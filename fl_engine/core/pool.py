"""Create a model pool from activation statistics (FlexFL, Section III-B, Eq. 1-3 and Alg. 1).

1. `measure_apoz` returns A_i, the fraction of exact zeros after ReLU i on the proxy set (Eq. 1). For a block, A_i is
   the mean over its ReLUs (Eq. 2).
2. `adjustment_weights` returns AdjW_i = log size(l_i) / log max_j size(l_j) (Eq. 3).
3. `spec_of` keeps int(s_i * out_i) channels of layer i, with s_i = clamp(gamma * (1 - A_i * AdjW_i), 0.01, 1).
4. `solve` returns the gamma for which the model has a given size.

Departs from the paper: Alg. 1 raises gamma by 0.01 until the size is within epsilon, which may never happen. Here a
bisection finds the closest reachable size, which works because the size is monotone in gamma. An unreachable target is
an error. `rule="authors"` is the search of the published code. This search tries gamma = 100/g for g = 1 .. 199 and
takes the first model whose prunable part is within 5 percentage points of the target. Because gamma decreases, this
model is usually larger than the target.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_engine.core.contracts import Algorithm, ModelFamily, ServerContext
from fl_engine.core.costs import count_params, macs_of
from fl_engine.core.errors import PoolError
from fl_engine.core.samples import split
from fl_engine.core.slicing import contains, full_shapes, layout_of, runnable, shapes
from fl_engine.core.types import FULL, Params, Pool, PoolModel, Prepared, SubmodelSpec
from fl_engine.core.widths import check_cuttable

Rule = Literal["closest", "authors"]

MIN_RATIO = 0.01
AUTHORS_GAMMAS = tuple(100 / g for g in range(1, 200))
AUTHORS_TOLERANCE = 0.05
SIGNS, MOST_CHARS = "_ . + - ( ) % = '", 64
NAMED = re.compile(rf"\w[\w.+()%=' -]{{0,{MOST_CHARS - 1}}}")
"""Pattern of valid names of pool models. These names are also used as folder names and in MLflow."""
UNMEASURED = 0.5
"""Value of A_i for a layer without a ReLU, such as an LSTM or an embedding. With the true fraction of zeros, which is
about 0, the layer would be the widest layer."""


def measure_apoz(family: ModelFamily, params: Params, x_nchw: Tensor, batch_size: int = 128) -> tuple[float, ...]:
    """Return A_i in [0, 1] for each prunable layer, or `UNMEASURED` for a layer without a ReLU. `x_nchw` contains
    normalised samples (the test samples of the proxy set)."""
    module = runnable(family, FULL, {k: v.clone() for k, v in params.items()}).eval()
    names = [name for layer in family.prunable() for name in layer.activations]
    zeros = dict.fromkeys(names, 0)
    entries = dict.fromkeys(names, 0)

    def count(name: str, _: nn.Module, __: object, output: Tensor) -> None:
        zeros[name] += int((output == 0).sum())
        entries[name] += output.numel()

    parts = split(x_nchw, batch_size, module)  # before anything is counted
    modules = dict(module.named_modules())
    for name in names:
        modules[name].register_forward_hook(partial(count, name))
    with torch.no_grad():
        for x in parts:
            module(x)
    shares = [[zeros[n] / entries[n] for n in layer.activations] for layer in family.prunable()]
    return tuple(sum(each) / len(each) if each else UNMEASURED for each in shares)


def layer_sizes(family: ModelFamily) -> tuple[int, ...]:
    """Return size(l_i), the number of parameters of each prunable layer (conv + BN, block, or fc). Raises PoolError if
    the network does not have prunable layers."""
    check_cuttable([layer.group for layer in family.prunable()], family)
    shapes = full_shapes(family)
    return tuple(
        sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(layer.params))
        for layer in family.prunable()
    )


def adjustment_weights(sizes: Sequence[int]) -> tuple[float, ...]:
    """Return AdjW_i in (0, 1] for each layer (Eq. 3). AdjW_i is 1 for the largest layer."""
    largest = math.log(max(sizes))
    return tuple(math.log(size) / largest for size in sizes)


def ratios_at(gamma: float, apoz: Sequence[float], adjust: Sequence[float]) -> tuple[float, ...]:
    """Return the width ratio s_i of each layer (Alg. 1, lines 11-12)."""
    return tuple(max(min((1 - a * w) * gamma, 1.0), MIN_RATIO) for a, w in zip(apoz, adjust, strict=True))


def spec_of(family: ModelFamily, ratios: Sequence[float]) -> SubmodelSpec:
    """Return the sub-model with the first max(1, int(s_i * out_i)) channels of each prunable layer."""
    groups = layout_of(family).groups
    layers = family.prunable()
    return SubmodelSpec.of({p.group: max(1, int(s * groups[p.group])) for p, s in zip(layers, ratios, strict=True)})


def default_epsilon(family: ModelFamily) -> float:
    """Return the default epsilon as a number of parameters. Epsilon is the largest of three numbers: 0.5 % of the
    network's parameters, the parameters of one channel of the widest layer, and half the parameters of the largest
    channel. Sizes change by whole channels, so the nearest size can differ from the target by half a channel."""
    whole, groups = count_params(family), family.layout().groups
    layers = [p.group for p in family.prunable()]
    each = {g: whole - count_params(family, SubmodelSpec.of({g: groups[g] - 1})) for g in layers if groups[g] > 1}
    widest = max(layers, key=lambda g: groups[g])
    return max(0.005 * whole, float(each.get(widest, 0)), max(each.values(), default=0) / 2)


def solve(
    family: ModelFamily, apoz: Sequence[float], adjust: Sequence[float], target: float, epsilon: float
) -> tuple[float, SubmodelSpec]:
    """Search for the sub-model whose size is closest to `target` parameters. Return a tuple (gamma, sub-model). Raises
    PoolError if the difference is more than `epsilon` parameters."""
    sizes: dict[SubmodelSpec, int] = {}  # cache the sizes, because the last steps of a bisection try the same models

    def at(gamma: float) -> tuple[int, SubmodelSpec]:
        spec = spec_of(family, ratios_at(gamma, apoz, adjust))
        if spec not in sizes:
            sizes[spec] = count_params(family, spec)
        return sizes[spec], spec

    low, high = 0.0, _gamma_max(apoz, adjust)
    for _ in range(60):
        middle = (low + high) / 2
        if at(middle)[0] <= target:
            low = middle
        else:
            high = middle
    (below, below_spec), (above, above_spec) = at(low), at(high)
    size, gamma, spec = min(
        (below, low, below_spec), (above, high, above_spec), key=lambda found: abs(found[0] - target)
    )
    if abs(size - target) > epsilon:
        whole = count_params(family)
        raise PoolError(
            f"no value of gamma yields a model with {target:,.0f} +- {epsilon:,.0f} parameters "
            f"({100 * target / whole:.2f} % of the network). The closest models have {below:,} and {above:,} "
            "parameters. Change the target, or increase algorithm.epsilon"
        )
    # Return the gamma with the fewest decimal places that gives the same model.
    shorter = (round(gamma, digits) for digits in range(2, 15))
    return next((g for g in shorter if g > 0 and at(g)[1] == spec), gamma), spec


def solve_as_authors(
    family: ModelFamily, apoz: Sequence[float], adjust: Sequence[float], share: float
) -> tuple[float, SubmodelSpec]:
    """Search as in the published code. Return a tuple (gamma, sub-model) for the largest tested model whose prunable
    layers are within 5 percentage points of `share`. Raises PoolError if no model is within this range."""
    prefixes = tuple(prefix for layer in family.prunable() for prefix in layer.params)
    layout, full = family.layout(), full_shapes(family)

    def prunable_size(spec: SubmodelSpec) -> int:
        sizes = shapes(layout, spec, full).items()
        return sum(math.prod(shape) for name, shape in sizes if name.startswith(prefixes))

    whole = prunable_size(FULL)
    for gamma in AUTHORS_GAMMAS:
        spec = spec_of(family, ratios_at(gamma, apoz, adjust))
        if abs(prunable_size(spec) / whole - share) <= AUTHORS_TOLERANCE:
            return gamma, spec
    raise PoolError(
        f"no gamma of the form 100/g yields a model with {100 * share:.0f} +- 5 % of the network's prunable "
        "parameters. Change the target, or set algorithm.rule=closest"
    )


def _gamma_max(apoz: Sequence[float], adjust: Sequence[float]) -> float:
    """Return the gamma above which layer widths are constant. Raises PoolError if gamma does not affect any layer."""
    slopes = [1 - a * w for a, w in zip(apoz, adjust, strict=True) if 1 - a * w > 1e-9]
    if not slopes:
        raise PoolError("every layer has APoZ * AdjW = 1, so gamma has no effect. Set algorithm.use_apoz=false")
    return (1 + 1e-12) / min(slopes)  # without the factor, gamma * slope may round to just below 1


def member(
    family: ModelFamily, name: str, spec: SubmodelSpec, *, dispatched: bool, reported: bool, **more: Any
) -> PoolModel:
    """Create a pool model. Compute its size and multiply-adds. `more` contains the optional fields of `PoolModel`."""
    params = count_params(family, spec)
    share = params / count_params(family)
    return PoolModel(name, spec, params, share, macs_of(family, spec), dispatched, reported, **more)


def pool_of(algorithm: Algorithm, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
    """Return the algorithm's pool. Raises PoolError unless the models have distinct names, are sorted by size, and the
    largest model is reported."""
    name = type(algorithm).__name__
    found: Any = algorithm.pool(family, prepared, server)
    if not isinstance(found, tuple | list) or not found or not all(isinstance(each, PoolModel) for each in found):
        raise PoolError(f"{name}.pool must return a tuple of at least one PoolModel, got {repr(found)[:100]}")
    names = [str(model.name) for model in found]
    if len(set(names)) < len(names) or not all(map(NAMED.fullmatch, names)):
        raise PoolError(
            f"{name}.pool: names must be distinct and have at most {MOST_CHARS} characters (letters, digits and "
            f"{SIGNS}), got {names}"
        )
    sizes = [model.params for model in found]
    if sizes != sorted(sizes) or not found[-1].reported:
        raise PoolError(
            f"{name}.pool must sort the models by size and set reported=True for the largest, got {names} with {sizes} "
            "parameters"
        )
    return tuple(found)


def ascending(pool: Pool) -> Pool:
    """Raise PoolError unless each model has more parameters than the previous model."""
    for small, large in pairwise(pool):
        if small.params >= large.params:
            raise PoolError(
                f"the pool model {small.name} ({small.params:,} parameters) must be smaller than {large.name} "
                f"({large.params:,}). Choose sizes that differ more, or a wider network"
            )
    return pool


def check_nested(family: ModelFamily, pool: Pool) -> Pool:
    """Raise PoolError unless each model is a smaller sub-model of the next model."""
    for small, large in pairwise(ascending(pool)):
        if not contains(family.layout(), large.spec, small.spec):
            raise PoolError(f"the pool model {small.name} must be a sub-model of the next larger model {large.name}")
    return pool


def similarity(ratios: Sequence[float], reference: Sequence[float]) -> float:
    """Return 1 - mean(|s_p%[i] - s_100%[i]| / s_100%[i]), FlexFL's similarity of two lists of ratios (Sec. IV-C1)."""
    return 1 - sum(abs(a - b) / b for a, b in zip(ratios, reference, strict=True)) / len(reference)

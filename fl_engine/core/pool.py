"""From activation statistics to a model pool (FlexFL, Sec. III-B, Eq. 1-3 and Alg. 1).

1. `measure_apoz`: A_i, the fraction of exact zeros after ReLU i over the proxy set (Eq. 1), mean over the ReLUs of
   a block (Eq. 2).
2. `adjustment_weights`: AdjW_i = log size(l_i) / log max_j size(l_j) (Eq. 3).
3. `ratios_at`, `spec_of`: layer i keeps int(s_i * out_i) channels, s_i = clamp(gamma * (1 - A_i * AdjW_i), 0.01, 1).
4. `solve`: the gamma whose model has a given size.

Departs from the paper: Alg. 1 raises gamma by 0.01 until the size is within epsilon, which may never happen. Size is
monotone in gamma, so a bisection finds the closest reachable size, and an unreachable target is an error.
`rule="authors"` is the published code's search: gamma runs over 100/g, g = 1 .. 199, and the first model whose prunable
part is within 5 points of the target is taken, which is larger than the target.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
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
"""Names of pool models, which are used for folders and in MLflow."""
UNMEASURED = 0.5
"""A_i of a layer without a ReLU (an LSTM, an embedding). Its real share of zeros is about 0, which would keep it as
wide as gamma allows."""


def measure_apoz(family: ModelFamily, params: Params, x_nchw: Tensor, batch_size: int = 128) -> tuple[float, ...]:
    """Return A_i per prunable layer, each in [0, 1]; `UNMEASURED` without a ReLU. `x_nchw` are normalised samples (the
    proxy's test part)."""
    module = runnable(family, FULL, {k: v.clone() for k, v in params.items()}).eval()
    names = [name for layer in family.prunable() for name in layer.activations]
    zeros = dict.fromkeys(names, 0)
    entries = dict.fromkeys(names, 0)

    def count(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            zeros[name] += int((output == 0).sum())
            entries[name] += output.numel()

        return hook

    parts = split(x_nchw, batch_size, module)  # before anything is counted
    modules = dict(module.named_modules())
    for name in names:
        modules[name].register_forward_hook(count(name))
    with torch.no_grad():
        for x in parts:
            module(x)
    layers = family.prunable()
    shares = [[zeros[n] / entries[n] for n in layer.activations] for layer in layers]
    return tuple(sum(each) / len(each) if each else UNMEASURED for each in shares)


def layer_sizes(family: ModelFamily) -> tuple[int, ...]:
    """Return size(l_i), the parameters of each prunable layer (conv + BN, block, or fc). Raises PoolError without
    any."""
    check_cuttable([layer.group for layer in family.prunable()])
    shapes = full_shapes(family)
    return tuple(
        sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(layer.params))
        for layer in family.prunable()
    )


def adjustment_weights(sizes: Sequence[int]) -> tuple[float, ...]:
    """Return AdjW_i in (0, 1]; the largest layer has 1 (Eq. 3)."""
    largest = math.log(max(sizes))
    return tuple(math.log(size) / largest for size in sizes)


def ratios_at(gamma: float, apoz: Sequence[float], adjust: Sequence[float]) -> tuple[float, ...]:
    """Return s_i of Alg. 1 lines 11-12."""
    return tuple(max(min((1 - a * w) * gamma, 1.0), MIN_RATIO) for a, w in zip(apoz, adjust, strict=True))


def spec_of(family: ModelFamily, ratios: Sequence[float]) -> SubmodelSpec:
    """Return the first int(s_i * out_i) channels of each prunable layer, at least one."""
    groups = layout_of(family).groups
    layers = family.prunable()
    return SubmodelSpec.of({p.group: max(1, int(s * groups[p.group])) for p, s in zip(layers, ratios, strict=True)})


def default_epsilon(family: ModelFamily) -> float:
    """Return the default epsilon in parameters: the largest of 0.5 % of the whole, one channel of the widest layer, and
    half a channel of the layer whose channels have most parameters. Sizes change in steps of one channel, and the
    middle of a step is half of it away from both ends."""
    whole, groups = count_params(family), family.layout().groups
    layers = [p.group for p in family.prunable()]
    each = {g: whole - count_params(family, SubmodelSpec.of({g: groups[g] - 1})) for g in layers if groups[g] > 1}
    widest = max(layers, key=lambda g: groups[g])
    return max(0.005 * whole, float(each.get(widest, 0)), max(each.values(), default=0) / 2)


def solve(
    family: ModelFamily,
    apoz: Sequence[float],
    adjust: Sequence[float],
    target: float,
    epsilon: float,
) -> tuple[float, SubmodelSpec]:
    """Return gamma and the sub-model whose size is closest to `target` parameters. Raises PoolError if it is further
    away than `epsilon` parameters."""

    sizes: dict[SubmodelSpec, int] = {}  # a bisection ends in dozens of steps between the same two

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
            f"no gamma gives a model of {100 * target / whole:.2f} % ({target:,.0f} parameters) within epsilon = "
            f"{epsilon:,.0f}, the closest have {below:,} and {above:,}. Change the target, or raise algorithm.epsilon"
        )
    return _shortest(gamma, lambda g: at(g)[1] == spec), spec


def _shortest(gamma: float, same: Callable[[float], bool]) -> float:
    """Return the shortest decimal that gives the same model. The bisection ends on the edge of a step, and a printed
    gamma must reproduce its model."""
    return next((g for g in (round(gamma, digits) for digits in range(2, 15)) if g > 0 and same(g)), gamma)


def solve_as_authors(
    family: ModelFamily, apoz: Sequence[float], adjust: Sequence[float], share: float
) -> tuple[float, SubmodelSpec]:
    """Apply the published code's rule: the first hit from above within 5 points, by the size of the prunable layers.
    Raises PoolError without a hit."""
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
        f"no gamma = 100/g, g = 1 .. {len(AUTHORS_GAMMAS)}, comes within 5 points of {100 * share:.0f} % "
        "(rule 'authors'): change the target, or take algorithm.rule=closest"
    )


def _gamma_max(apoz: Sequence[float], adjust: Sequence[float]) -> float:
    """Return the gamma above which no layer gets wider. Raises PoolError if no gamma widens any layer."""
    slopes = [1 - a * w for a, w in zip(apoz, adjust, strict=True) if 1 - a * w > 1e-9]
    if not slopes:
        raise PoolError("every layer has APoZ * AdjW = 1, so no gamma can widen any. Set algorithm.use_apoz=false")
    return (1 + 1e-12) / min(slopes)  # times a slope, the quotient alone may round to just below 1


def member(
    family: ModelFamily,
    name: str,
    spec: SubmodelSpec,
    *,
    dispatched: bool,
    reported: bool,
    **more: Any,
) -> PoolModel:
    """Return a pool model with its costs; `more` are further fields of `PoolModel`."""
    params = count_params(family, spec)
    share = params / count_params(family)
    return PoolModel(name, spec, params, share, macs_of(family, spec), dispatched, reported, **more)


def pool_of(algorithm: Algorithm, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
    """Return the algorithm's pool. Raises PoolError unless it has models of different names from the smallest to the
    largest, which is reported."""
    name = type(algorithm).__name__
    given: Any = algorithm.pool(family, prepared, server)
    if not isinstance(given, tuple | list) or not given or not all(isinstance(each, PoolModel) for each in given):
        raise PoolError(f"{name}.pool must return one PoolModel or more, smallest first, got {repr(given)[:100]}")
    found: Pool = tuple(given)
    for small, large in pairwise(found):
        if small.params > large.params:
            raise PoolError(
                f"{name}.pool must return the smallest model first, got {small.name} ({small.params:,} parameters) "
                f"before {large.name} ({large.params:,})"
            )
    names = [model.name for model in found]
    if twice := [each for each in names if names.count(each) > 1]:
        raise PoolError(f"{name}.pool: two models are named {twice[0]}; names must differ")
    for each in names:
        if not isinstance(each, str) or not NAMED.fullmatch(each):
            raise PoolError(
                f"{name}.pool: a model's name must begin with a letter or digit and have at most {MOST_CHARS} letters, "
                f"digits, spaces and any of {SIGNS}, got {each!r}"
            )
    if not found[-1].reported:
        raise PoolError(f"{name}.pool: the largest model, {names[-1]}, must be reported, because its score is `full`")
    return found


def ascending(pool: Pool) -> Pool:
    """Raise PoolError unless each model has more parameters than the one before."""
    for small, large in pairwise(pool):
        if small.params >= large.params:
            raise PoolError(
                f"{small.name} ({small.params:,} parameters) is not smaller than {large.name} ({large.params:,}): "
                "set them further apart or use a wider model"
            )
    return pool


def check_nested(family: ModelFamily, pool: Pool) -> Pool:
    """Raise PoolError unless each model is a smaller sub-model of the next."""
    for small, large in pairwise(ascending(pool)):
        if not contains(family.layout(), large.spec, small.spec):
            raise PoolError(f"{small.name} is not a sub-model of {large.name}: the pool would not nest")
    return pool


def similarity(ratios: Sequence[float], reference: Sequence[float]) -> float:
    """Return sim = 1 - mean(|s_p%[i] - s_100%[i]| / s_100%[i]) (FlexFL Sec. IV-C1): 1 if a small proxy prunes alike."""
    return 1 - sum(abs(a - b) / b for a, b in zip(ratios, reference, strict=True)) / len(reference)

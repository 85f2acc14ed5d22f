"""Checks the values that the algorithm's `init`, `plan` and `merge` return, directly after each call."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor

from fl_engine.core.errors import Diverged, ModelError, kind_of
from fl_engine.core.slicing import largest
from fl_engine.core.state import constants, dumped, pack
from fl_engine.core.types import RoundPlan
from fl_engine.training.evaluation import published

HINTS = "Hints may contain Python's int, finite float, bool, str and None, lists of these, and dicts with str keys"


def check_planned(algorithm: Any, plan: Any, clients: int, models: int) -> None:
    """Raise ModelError if `plan` is not a RoundPlan or a client has two assignments. The client, the level and the
    hints of each assignment must be valid."""
    name = f"{type(algorithm).__name__}.plan"
    if not isinstance(plan, RoundPlan):
        raise ModelError(f"{name} must return a RoundPlan, got {kind_of(plan)}")
    asked = [assignment.client for assignment in plan.assignments]
    if len(plan.assignment_of) < len(asked):
        raise ModelError(f"{name} must return at most one assignment per client, got assignments for {asked}")
    for assignment in plan.assignments:
        for value, most, what in ((assignment.client, clients, "client"), (assignment.level, models, "level")):
            # JSON does not support NumPy integers, which are not instances of int.
            if not isinstance(value, int) or not 0 <= value < most:
                raise ModelError(f"{name}: an assignment's {what} must be an int from 0 to {most - 1}, got {value!r}")
        if assignment.hints:
            dumped(dict(assignment.hints), dict[str, Any], f"{name}, client {assignment.client}: hints", HINTS)


def check_begun(algorithm: Any, state: Any) -> None:
    """Raise ModelError if the ledger cannot store the state that `init` returned."""
    if not hasattr(state, "params"):
        name = type(algorithm).__name__
        raise ModelError(f"{name}.init must return a frozen dataclass with `params`, got {kind_of(state)}")
    pack(state)


def check_merged(algorithm: Any, before: Any, after: Any) -> None:
    """Raise ModelError if `merge` changed the state's class, constant fields, or a weight's name, type or shape."""
    merge = f"{type(algorithm).__name__}.merge"
    if type(after) is not type(before):
        wanted = f"must return a {type(before).__name__}, like `init`"
        raise ModelError(f"{merge} {wanted}, got {kind_of(after)}. Use dataclasses.replace(state, params=...)")
    for name in constants(before):
        if getattr(after, name) is not getattr(before, name):
            raise ModelError(
                f"{merge} must not change `{name}`, because a field declared with constant() is not stored. Declare "
                "the field without constant(), or do not change its value"
            )
    old, new = ({n: (t.dtype, tuple(t.shape)) for n, t in published(each).items()} for each in (before, after))
    if wrong := {name for name, _ in old.items() ^ new.items()}:
        kept = "must return the same names, types and shapes in state.params, even for weights that no client trained"
        raise ModelError(f"{merge} {kept}. Different: {_listed(wrong)}")


def check_finite(algorithm: Any, before: Any, after: Any, round: int) -> None:
    """Raise Diverged if the absolute value of a merged weight is not finite or exceeds `slicing.largest`. The same
    limit applies to updates. The check reads each new tensor once (0.25 s for 1.3 GB on one core)."""
    old, new = published(before), published(after)
    made = [name for name, tensor in new.items() if tensor is not old[name] and tensor.is_floating_point()]
    wrong = {name for name in made if not _within(new[name], largest(name))}
    if not wrong:
        return
    end = f", or end this run before the round: --resume --set rounds.stop={round}" if round else ""
    raise Diverged(
        f"the model diverged in round {round + 1}: after {type(algorithm).__name__}.merge, {_listed(wrong)} of "
        f"{len(new)} weights are not finite or exceed {largest(min(wrong)):g}. The round is not committed, and "
        "a resumed run would diverge again. Start a run with a smaller training.lr, algorithm.server.lr or "
        f"algorithm.aggregation.clip{end}"
    )


def _within(tensor: Tensor, most: float) -> bool:
    if not tensor.numel():
        return True
    least, greatest = (float(end) for end in tensor.detach().aminmax())  # Both bounds are NaN if any element is NaN.
    return max(-least, greatest) <= most


def _listed(names: Set[str]) -> str:
    first, *more = sorted(names)
    return f"{first}{f' (and {len(more)} more)' if more else ''}"

"""Checks of what an algorithm returns from `init`, `plan` and `merge`.

They run in the same round, because a wrong value that is found later does not show where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from fl_engine.core.errors import Diverged, ModelError, kind_of
from fl_engine.core.slicing import largest
from fl_engine.core.state import constants, dumped, pack
from fl_engine.core.types import RoundPlan
from fl_engine.training.evaluation import published

HINTS = "Hints are JSON: finite int and float, bool, str and None of Python's own, lists of these, and dicts by str"


def check_planned(algorithm: Any, plan: Any, clients: int, models: int) -> None:
    """Check the result of an algorithm's `plan`.

    Raises:
        ModelError: The result is not a RoundPlan, or a client has more than one assignment, or an assignment has a
            model outside the pool or hints that are not JSON.
    """
    gave = f"{type(algorithm).__name__}.plan gave"
    if not isinstance(plan, RoundPlan):
        raise ModelError(f"{gave} {kind_of(plan)}, where a RoundPlan is expected")
    seen: set[int] = set()
    for order in plan.orders:
        if not isinstance(order.client, int):  # numpy's integers are none, and no JSON takes them
            raise ModelError(f"{gave} an order for client {order.client!r}, where an int is expected")
        if not 0 <= order.client < clients:
            raise ModelError(f"{gave} an order for client {order.client}; there are the clients 0 to {clients - 1}")
        if not isinstance(order.level, int) or not 0 <= order.level < models:
            raise ModelError(f"{gave} an order of level {order.level!r}, where an int of 0 to {models - 1} is expected")
        if order.client in seen:
            raise ModelError(f"{gave} two orders for client {order.client}: in a round each client has one at most")
        if order.hints:
            where = f"{gave} client {order.client} hints that no other process gets: hints"
            dumped(dict(order.hints), dict[str, Any], where, HINTS)
        seen.add(order.client)


def check_begun(algorithm: Any, state: Any) -> None:
    """Raises ModelError unless what `init` gave is a state that the ledger can hold (`core.state`)."""
    if not hasattr(state, "params"):
        raise ModelError(
            f"{type(algorithm).__name__}.init gave {kind_of(state)}, where a state is expected: a frozen dataclass "
            "with `params`"
        )
    pack(state)


def check_merged(algorithm: Any, before: Any, after: Any) -> None:
    """Check the result of an algorithm's `merge`.

    Raises:
        ModelError: The state has another class or other constant fields than before, or its weights have other names,
            types or shapes.
    """
    merge = f"{type(algorithm).__name__}.merge"
    if not hasattr(after, "params"):
        raise ModelError(
            f"{merge} gave {kind_of(after)}, where a state with `params` is expected: "
            "return dataclasses.replace(state, params=...)"
        )
    if type(after) is not type(before):
        raise ModelError(
            f"{merge} gave {kind_of(after)}, where a {type(before).__name__} like `init`'s is expected: "
            "return dataclasses.replace(state, ...)"
        )
    for name in constants(before):
        if getattr(after, name) is not getattr(before, name):
            raise ModelError(
                f"{merge} gave another `{name}`, a field made with constant(): it is not stored, and a run that goes "
                "on has that of `init`. Declare it without constant(), or keep it"
            )
    if not isinstance(after.params, Mapping):
        raise ModelError(f"{merge} gave {kind_of(after.params)} as state.params, where tensors by name are expected")
    old, new = published(before), published(after)
    if missing := old.keys() - new.keys():
        raise ModelError(f"{merge} gave no {_listed(missing)}: what nobody trained keeps its value in state.params")
    if unknown := new.keys() - old.keys():
        raise ModelError(f"{merge} gave {_listed(unknown)}, which state.params does not have")
    for name, tensor in old.items():
        if (gave := _said(new[name])) != (wanted := _said(tensor)):
            raise ModelError(f"{merge} gave {name} as {gave}, where {wanted} is expected")


def check_finite(algorithm: Any, before: Any, after: Any, round: int) -> None:
    """Check that clients can be sent the merged weights. Reads each new tensor once, 0.25 s for 1.3 GB on one core.

    Raises:
        Diverged: A weight is not finite, or larger than clients may send (`slicing.largest`).
    """
    old, new = published(before), published(after)
    made = [name for name, tensor in new.items() if tensor is not old[name] and tensor.is_floating_point()]
    wrong = {name for name in made if not _within(new[name], largest(name))}
    if not wrong:
        return
    rules = (getattr(getattr(algorithm, field, None), "name", None) for field in ("aggregation", "server"))
    named = ", ".join(f"{of} {name}" for of, name in zip(("aggregation", "server"), rules, strict=True) if name)
    how = f" ({named})" if named else ""
    ends = f", or end this one there: --resume --set rounds.stop={round}" if round else ""
    raise Diverged(
        f"the model has diverged: {type(algorithm).__name__}.merge{how} gave {_listed(wrong)} of {len(new)} in round "
        f"{round + 1}, which is not finite everywhere, or beyond {largest(min(wrong)):g}. This round is not committed, "
        f"and the model of round {round} stays; --resume alone would compute the same again. Begin a run with smaller "
        f"training.lr, algorithm.server.lr or algorithm.aggregation.clip{ends}"
    )


def _within(tensor: Tensor, most: float) -> bool:
    if not tensor.numel():
        return True
    least, greatest = (float(end) for end in tensor.detach().aminmax())  # both are NaN where one number is
    return max(-least, greatest) <= most


def _listed(names: Set[str]) -> str:
    first, *more = sorted(names)
    return f"{first}{f' (and {len(more)} more)' if more else ''}"


def _said(value: Any) -> str:
    """Return a tensor's type and shape, such as `torch.float32 (16, 1, 3, 3)`, or the type of another value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{type(value).__module__}.{type(value).__qualname__}"

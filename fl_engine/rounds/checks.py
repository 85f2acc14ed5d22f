"""What an algorithm's `plan` and `merge` may give: told by name in the round that asks them, since whatever met a wrong
value later would not say where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from fl_engine.core.errors import ModelError, kind_of
from fl_engine.core.types import RoundPlan
from fl_engine.training.evaluation import published


def check_planned(algorithm: Any, plan: Any, clients: int, models: int) -> None:
    """Raises ModelError unless what `plan` gave is a RoundPlan with at most one order for each client, each of a model
    of the pool."""
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
        seen.add(order.client)


def check_merged(algorithm: Any, before: Any, after: Any) -> None:
    """Raises ModelError unless what `merge` gave is a state whose weights have the names, types and shapes of those
    before."""
    merge = f"{type(algorithm).__name__}.merge"
    if not hasattr(after, "params"):
        raise ModelError(
            f"{merge} gave {kind_of(after)}, where a state with `params` is expected: "
            "return dataclasses.replace(state, params=...)"
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


def _listed(names: Set[str]) -> str:
    first, *more = sorted(names)
    return f"{first}{f' (and {len(more)} more)' if more else ''}"


def _said(value: Any) -> str:
    """`torch.float32 (16, 1, 3, 3)`; the type of what is no tensor."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{type(value).__module__}.{type(value).__qualname__}"

"""How far updates moved from the weights that were sent (`acceptance.Moved`), for the norm bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor

from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientUpdate, ParamLayout, Params, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.rounds.acceptance import Moved
from fl_engine.storage.store import tensor_bytes

SMALL = 2**15
"""Elements. Smaller tensors of several updates are measured in one call; torch may split larger ones among threads,
and then adds in another order."""
WAITING_BYTES = 2**20
"""Bytes of updates that wait to be measured together."""

Kind = tuple[SubmodelSpec, tuple[str, ...], SubmodelSpec, int]
"""What updates contain, and what their clients were sent. Updates of equal kind are measured together."""


class Movements:
    """How far the updates of a round moved, by client in order of arrival. Small updates are measured together, with
    the same bits as alone."""

    def __init__(self, plan: RoundPlan, layout: ParamLayout) -> None:
        self._plan, self._layout = plan, layout
        self._found: dict[int, Moved | None] = {}
        self._held: list[ClientUpdate] = []
        self._held_kind: Kind | None = None
        self._bytes = 0

    def add(self, update: ClientUpdate) -> None:
        """`update` is what a client of the plan sent."""
        order = self._plan.order_of[update.client]
        kind = (update.spec, tuple(update.payload), order.spec, id(order.payload))
        if kind != self._held_kind:
            self._measure()
            self._held_kind = kind
        self._found[update.client] = None
        self._held.append(update)
        self._bytes += tensor_bytes(update.payload)
        if self._bytes > WAITING_BYTES:
            self._measure()

    def all(self) -> dict[int, Moved]:
        self._measure()
        return {client: moved for client, moved in self._found.items() if moved is not None}

    def _measure(self) -> None:
        held, self._held, self._bytes = self._held, [], 0
        if held:
            order = self._plan.order_of[held[0].client]
            self._found |= zip((update.client for update in held), _movements(held, order, self._layout), strict=True)


def movement(update: ClientUpdate, order: WorkOrder, layout: ParamLayout) -> Moved:
    """How far the trained numbers moved. The bits do not depend on the numbers' memory layout."""
    return _movements([update], order, layout)[0]


def _movements(updates: Sequence[ClientUpdate], order: WorkOrder, layout: ParamLayout) -> list[Moved]:
    """Return `movement` of each of these updates of one kind."""
    spec = updates[0].spec
    sent = order.payload if spec == order.spec else take(order.payload, layout, spec, have=order.spec)
    pairs = {name: ([update.payload[name] for update in updates], sent[name]) for name in updates[0].payload}
    moved = _each(pairs, len(updates))
    return [m._replace(steps=max(1.0, u.metrics.get("steps", 1.0))) for m, u in zip(moved, updates, strict=True)]


def size_of(params: Params) -> Moved:
    """Return the distance of the numbers from zero, in the same measure."""
    zero = torch.zeros(())
    return _each({name: ([tensor], zero) for name, tensor in params.items()}, 1)[0]


def size_sent(plan: RoundPlan) -> Moved:
    """Return the median size of the weights and of the running statistics that the assignments send."""
    sizes = {order.level: size_of(order.payload) for order in plan.orders}
    weights, running = ([sizes[order.level][kind] for order in plan.orders] for kind in (0, 1))
    return Moved(median_low(weights), median_low(running))


def _each(pairs: Mapping[str, tuple[list[Tensor], Tensor]], count: int) -> list[Moved]:
    """`pairs`: for each name the tensors of all `count` updates, and the one that was sent."""
    far: tuple[list[list[float]], list[list[float]]] = [], []
    statistics = 0
    for name, (here, there) in pairs.items():
        kind = is_statistic(name)
        far[kind].append(_distances(here, there))
        statistics += kind * here[0].numel()
    weights, running = ([math.hypot(*parts) for parts in zip(*of, strict=True)] or [0.0] * count for of in far)
    root = math.sqrt(max(1, statistics))
    return [Moved(w, r / root) for w, r in zip(weights, running, strict=True)]


def _distances(here: Sequence[Tensor], there: Tensor) -> list[float]:
    """The L2 norm of the difference of each to `there`."""
    sent = _plain(there)
    if len(here) == 1 or here[0].numel() >= SMALL:
        return [float(torch.dist(_plain(one), sent)) for one in here]
    with torch.no_grad():
        rows = torch.stack(list(here)).contiguous() - sent
    found: list[float] = torch.linalg.vector_norm(rows.view(len(here), -1), dim=1).tolist()
    return found


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()

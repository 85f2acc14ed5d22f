"""Injects the faults of `rounds.faults`, on the coordinator and for every backend.

Clients, workers and mailboxes contain no code for faults. An assignment struck by `drop` is not sent. An update struck
by another fault is changed when the coordinator receives it, and then validated as if it came from the client. The
store always has the honest update. An update that is read again after a restart is therefore changed in the same way.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from fl_engine.core.contracts import Backend
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import take
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, RoundPlan, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import Rejected, packed
from fl_engine.exchange.updates import received, update_of
from fl_engine.fleet import faults
from fl_engine.fleet.faults import Fault
from fl_engine.rounds.run import Run

REFUSED = ("nan", "corrupt")
"""Faults after which no update passes validation."""


def outcomes(run: Run, plan: RoundPlan, rest: RoundPlan, backend: Backend) -> Generator[Outcome, None, None]:
    """Run `rest`, a part of the plan, in the backend, without the assignments of clients that drop out."""
    kinds = {order.client: fault.kind for order in plan.orders if (fault := run.fault(order)) is not None}
    dropped = {order.client for order in rest.orders if kinds.get(order.client) == "drop"}
    for client in sorted(dropped):
        yield ClientFailure(plan.round, client, "drop", "dropped out (rounds.faults)")
    if dropped:
        rest = replace(rest, orders=tuple(order for order in rest.orders if order.client not in dropped))
    if rest.wanted is not None and kinds:  # the backend counts updates before their faults are applied
        refused = sum(kind in REFUSED for kind in kinds.values())
        rest = replace(rest, wanted=min(rest.wanted + refused, rest.adopted + len(rest.orders)))
    yield from backend.run(run.algorithm, rest)


def arrived(run: Run, order: WorkOrder, outcome: Outcome) -> Outcome:
    """Return what the server receives instead of `outcome`, which is the honest client's."""
    fault = run.fault(order)
    if fault is None or isinstance(outcome, ClientFailure):
        return outcome
    rules = replace(run.site.rules, algorithm=run.algorithm)
    try:
        if fault.kind == "corrupt":
            manifest, value = packed(outcome, order)
            assert value is not None
            damaged = faults.damaged(bytes(value))
            return update_of(manifest, lambda limit: damaged, order, rules)
        return received(_false(fault, run, order, outcome), order, rules) if fault.kind in faults.LIES else outcome
    except ModelError as error:
        said = f"codec.up cannot encode the trained weights: {error}"
        return ClientFailure(order.round, order.client, "train", said, "finite")
    except Rejected as error:
        return ClientFailure(order.round, order.client, "validate", str(error), error.code)


def _false(fault: Fault, run: Run, order: WorkOrder, update: ClientUpdate) -> ClientUpdate:
    """The update of a client that lies about the weights; what it keeps for its next assignment stays. Raises
    ModelError if the codec cannot express the false weights."""
    layout = run.site.layout
    sent = take(order.payload, layout, update.spec, have=order.spec)
    names = [name for name in layout.slots if name in update.payload]  # a file does not keep the order of tensors
    payload = faults.lie(fault, sent, {name: update.payload[name] for name in names})
    payload = {name: tensor.contiguous() for name, tensor in payload.items()}
    return replace(update, payload=payload, encoded=coding.answered(order, update.spec, payload, layout))

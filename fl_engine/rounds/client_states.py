"""Clients' states: sent with a round's orders, received with the updates that are merged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from fl_engine.core.clients import travelling
from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import Header, Params, RoundPlan
from fl_engine.exchange.manifest import Rejected
from fl_engine.exchange.updates import check_state
from fl_engine.rounds.answers import Answers
from fl_engine.rounds.run import Run
from fl_engine.storage.tensor_files import ClientStates

log = logging.getLogger("flexfleet")


def handed_out(run: Run, plan: RoundPlan, files: Mapping[int, str], states: ClientStates | None) -> RoundPlan:
    """Each order with the state of its own client. A client whose file is missing or damaged begins like one that has
    not taken part yet."""
    if states is None:
        return plan
    orders = []
    for order in plan.orders:
        state: Params = {}
        if order.client in files:
            state = _read(states, files[order.client], run.client_state, plan.round, order.client)
        orders.append(replace(order, memory={**order.memory, **travelling(state)}))
    return replace(plan, orders=tuple(orders))


def _read(states: ClientStates, file: str, expected: Header, round: int, client: int) -> Params:
    try:
        state = states.get(file)
        check_state(state, expected)
    except (IntegrityError, Rejected) as error:
        said = "what it keeps is lost, it begins as one that has not taken part yet"
        log.warning("round %d, client %d: %s: %s (states/%s)", round + 1, client, said, error, file)
        return {}
    return state


def taken_in(files: Mapping[int, str], answers: Answers, states: ClientStates | None) -> Mapping[int, str]:
    """By client, the file of its state after the round."""
    if states is None:
        return files
    return {**files, **{client: states.put(state, files.get(client)) for client, state in answers.states()}}

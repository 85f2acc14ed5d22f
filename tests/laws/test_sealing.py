"""What clients keep, encrypted: the model is the same, the server reads nothing, and no lie reaches further."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.client_state import kept_by_clients, travelling
from fl_engine.core.errors import ClientError, IntegrityError
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, Params
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.sealing import KEY_BYTES, forms, key_from, seal, unseal
from fl_engine.exchange.updates import packed, payload_bytes
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.client_states import ClientStates, named
from fl_engine.storage.store import FolderStore, encode
from fl_engine.testing import played
from fl_engine.testing.personal import PersonalHeads
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    assert_same_bits,
    context_of,
    start_of,
    tiny_fleet,
    tiny_site,
)

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
HEADS = PersonalHeads(training=replace(TRAINING, fraction=0.5, epochs=1))
PLAIN = tiny_site(HEADS, fleet=tiny_fleet(6))
SEALED = replace(PLAIN, sealed=True, state_key=KEY)
DECLARED = kept_by_clients(HEADS, PLAIN.family, PLAIN.pool)
PLAN = HEADS.plan(start_of(HEADS, PLAIN), context_of(PLAIN, 0, SEED))
ORDER = PLAN.orders[0]

SHAPES = st.dictionaries(
    st.text("abc./", min_size=1, max_size=4), st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4
)


@given(SHAPES, st.integers(0, 2**31), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_a_state_comes_back_to_its_client_and_its_length_is_known(
    shapes: dict[str, tuple[int, ...]], client: int, key: bytes
) -> None:
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    hidden = seal(state, key, client)
    assert coding.misfit(hidden, forms(shapes, sealed=True)) is None
    assert_same_bits(seal(dict(reversed(state.items())), key, client), hidden)
    assert_same_bits(unseal(hidden, shapes, key, client), state)


@pytest.mark.parametrize("what", ["key", "client", "bit", "cut", "empty", "name", "plain"])
def test_what_was_not_sealed_for_this_client_is_no_state(what: str) -> None:
    state = {name: torch.ones(shape) for name, shape in DECLARED.items()}
    ((name, value),) = seal(state, KEY, 3).items()
    flipped = value.clone()
    flipped[7] ^= 1
    found: dict[str, Params] = {"bit": {name: flipped}, "cut": {name: value[:-4]}, "empty": {name: value[:0]}}
    found |= {"name": {"other": value}, "plain": state}
    with pytest.raises(IntegrityError, match="encrypted"):
        unseal(found.get(what, {name: value}), DECLARED, OTHER if what == "key" else KEY, 4 if what == "client" else 3)


def test_a_client_that_holds_the_key_and_seals_another_length_is_told() -> None:
    with pytest.raises(IntegrityError, match="it holds 4 bytes, 4 times"):
        unseal(seal({"a": torch.ones(1)}, KEY, 3), DECLARED, KEY, 3)


def test_a_key_is_a_file_of_64_bytes(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ClientError, match="cannot be read"):
        key_from(path)
    path.write_bytes(KEY + b"\n")
    with pytest.raises(ClientError, match="holds 65 bytes"):
        key_from(path)
    path.write_bytes(KEY)
    assert key_from(path) == KEY


# ------------------------------------------------------------------------------------------------------ rounds
def federated(folder: Path, site: Site, stop: int = 3) -> Params:
    settings = RoundsConfig(stop=stop, evaluate_every=1000, commit_every=1, keep_updates=True)
    params: Params = played.federated(Run(HEADS, site, settings), FolderStore(folder))[0].params
    return params


def kept(folder: Path) -> dict[int, Params]:
    checkpoints = Checkpoints(FolderStore(folder))
    files = named(checkpoints.rest(checkpoints.commits()[-1]))
    return {client: ClientStates(checkpoints).get(name) for client, name in files.items()}


def test_the_model_is_the_same_and_the_server_reads_nothing(tmp_path: Path) -> None:
    plain, hidden = federated(tmp_path / "plain", PLAIN), federated(tmp_path / "hidden", SEALED)
    assert_same_bits(hidden, plain)
    heads, stored = kept(tmp_path / "plain"), kept(tmp_path / "hidden")
    assert heads.keys() == stored.keys() and heads
    files = b"".join(path.read_bytes() for path in (tmp_path / "hidden").rglob("*.safetensors"))
    for client, head in heads.items():
        assert_same_bits(unseal(stored[client], DECLARED, KEY, client), head)
        assert not any(tensor.numpy().tobytes() in files for tensor in head.values())


def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same(tmp_path: Path) -> None:
    whole = federated(tmp_path / "whole", SEALED)
    for stop in (1, 2, 3):
        last = federated(tmp_path / "parts", SEALED, stop)
    assert_same_bits(last, whole)


def test_a_device_with_another_key_begins_as_one_that_never_took_part(caplog: pytest.LogCaptureFixture) -> None:
    first = outcome(SEALED)
    with caplog.at_level(logging.WARNING):
        again = outcome(replace(SEALED, state_key=OTHER), first.state)
    assert "what it keeps is lost" in caplog.text and f"client {ORDER.client}" in caplog.text
    assert_same_bits(again.payload, first.payload)
    assert any(not outcome(SEALED, first.state).payload[n].equal(first.payload[n]) for n in first.payload)


def test_numbers_beyond_the_bound_are_lost_on_the_device_too(caplog: pytest.LogCaptureFixture) -> None:
    """The server cannot look for them."""
    worst = seal({name: torch.full(shape, float("nan")) for name, shape in DECLARED.items()}, KEY, ORDER.client)
    with caplog.at_level(logging.WARNING):
        found = outcome(SEALED, worst)
    assert "is not finite everywhere" in caplog.text
    assert_same_bits(found.payload, outcome(SEALED).payload)


def outcome(site: Site, state: Params | None = None) -> ClientUpdate:
    found = execute(HEADS, replace(ORDER, memory=travelling(state or {})), site)
    assert isinstance(found, ClientUpdate), found
    return found


def received(folder: Path, state: Params) -> Outcome:
    """What the server has of an update with this state."""
    mailbox = Mailbox(FolderStore(folder), replace(SEALED.rules, algorithm=HEADS), key=lambda order: b"key")
    mailbox.put_outcome(PLAN, replace(outcome(SEALED), state=state))
    return mailbox.receive(PLAN, ORDER.client)


def test_an_honest_sealed_state_has_room(tmp_path: Path) -> None:
    update = outcome(SEALED)
    assert_same_bits(received(tmp_path, update.state).state, update.state)  # type: ignore[union-attr]
    rules = replace(SEALED.rules, algorithm=HEADS)
    value = packed(update, ORDER)[1]
    assert value is not None and len(value) <= payload_bytes(ORDER, rules.client_state)


LIES: dict[str, Callable[[Params], Params]] = {
    "not sealed": lambda state: {name: torch.zeros(shape) for name, shape in DECLARED.items()},
    "longer": lambda state: {name: torch.cat([value, value]) for name, value in state.items()},
    "none": lambda state: {},
    "another type": lambda state: {name: value.float() for name, value in state.items()},
}


@pytest.mark.parametrize("lie", LIES)
def test_another_form_is_refused(lie: str, tmp_path: Path) -> None:
    found = received(tmp_path, LIES[lie](outcome(SEALED).state))
    assert isinstance(found, ClientFailure) and found.stage == "validate"
    assert found.code in ("names", "shape", "dtype")


def test_the_worst_sealed_state_is_bytes_that_nobody_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noise = {name: torch.randint_like(value, 256) for name, value in outcome(SEALED).state.items()}
    taken = received(tmp_path, noise)
    assert isinstance(taken, ClientUpdate) and encode(taken.state) == encode(noise)
    assert_same_bits(outcome(SEALED, noise).payload, outcome(SEALED).payload)
    assert "was not encrypted with this key for this client" in caplog.text

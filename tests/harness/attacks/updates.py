"""Results that the engine has to refuse. tests/laws/test_updates.py has the others, each with its code."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

from fl_engine.core.types import ClientUpdate, Params
from fl_engine.exchange import updates
from fl_engine.exchange.updates import payload_bytes
from fl_engine.storage.store import MemoryStore
from fl_engine.testing.tiny import assert_same_outcomes
from tests.harness.attacks.scene import Scene
from tests.harness.attacks.table import Attack

scene = cache(Scene.open)


def control() -> None:
    """Checks that the honest answer is accepted unchanged; else a refusal would prove nothing."""
    store = MemoryStore()
    store.files |= scene().files()
    assert_same_outcomes([scene().ledger(store).receive(scene().plan, scene().client)], [scene().honest])


def replay() -> str | None:
    """Sends the files of an earlier round unchanged."""
    earlier, now = scene(), scene(1)
    files = {key.replace("rounds/00000", "rounds/00001"): value for key, value in earlier.files().items()}
    moved = {key.replace(str(earlier.base[-2:]), now.base[-2:]): value for key, value in files.items()}
    by_number = {f"{now.base}{key[key.rindex('.') :]}": value for key, value in moved.items()}
    return now.taken(by_number)


def first_answer_late() -> str | None:
    """Sends an answer after the round was closed without it."""
    s, store = scene(), MemoryStore()
    closed = s.closed(store)
    store.files |= s.files()
    found = s.merged(store, closed)
    return "came in after the round was closed" if isinstance(found, ClientUpdate) else None


def holds(change: Callable[[Params], Params]) -> str | None:
    return scene().taken(scene().files(payload=scene().tensors(change)))


def raw(payload: bytes) -> str | None:
    return scene().taken(scene().files(payload=payload))


def renamed(params: Params) -> Params:
    name = next(iter(params))
    return {("x" + n if n == name else n): t for n, t in params.items()}


def exchanged(params: Params) -> Params:
    """Exchanges two tensors of different shapes. (With the same shape, the result would be a valid update.)"""
    names = list(params)
    one = names[0]
    other = next(n for n in names if params[n].shape != params[one].shape)
    return {**params, one: params[other], other: params[one]}


def many_tensors() -> str | None:
    """As many tensors without numbers as a file of the allowed size can list: each becomes an object of torch's."""
    s = scene()
    room = payload_bytes(s.order, s.site.rules.client_state) - 100
    one = json.dumps({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, separators=(",", ":"))
    said = ("{" + ",".join(f'"{number:06}":{one}' for number in range(room // (len(one) + 10))) + "}").encode()
    with mock.patch.object(updates, "decode", side_effect=AssertionError("it was read")):
        return raw(struct.pack("<Q", len(said)) + said)


def long_header() -> str | None:
    return raw(struct.pack("<Q", 2**62) + b"{}")


def nested_manifest() -> str | None:
    s = scene()
    return s.taken({**s.files(), f"{s.base}.json": b'{"spec":' * 10**4 + b"0" + b"}" * 10**4})


def _attack(name: str, tries: str, run: Callable[..., str | None], *given: Any, **more: Any) -> Attack:
    return Attack(name, tries, "engine", partial(run, *given, **more))


ATTACKS = (
    _attack("replay of an earlier round", "to give an old answer again", replay),
    _attack("late: the first answer", "to come after the round was closed", first_answer_late),
    _attack("renamed tensors", "to smuggle tensors in", holds, renamed),
    _attack("exchanged tensors", "the same", holds, exchanged),
    _attack("a header without end", "to fill the memory", long_header),
    _attack("a header of many tensors", "the same", many_tensors),
    _attack("a manifest of many levels", "to crash the reader", nested_manifest),
)

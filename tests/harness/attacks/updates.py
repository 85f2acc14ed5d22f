"""Answers with a wrong sender, order, file or number. The engine has to refuse all of them."""

from __future__ import annotations

import json
import struct
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientFailure, ClientUpdate, Params, SubmodelSpec
from fl_engine.exchange import updates
from fl_engine.exchange.manifest import key_of
from fl_engine.exchange.updates import payload_bytes
from fl_engine.storage.store import MemoryStore, encode
from fl_engine.testing.tiny import assert_same_outcomes
from tests.harness.attacks.scene import CLIENTS, Scene
from tests.harness.attacks.table import Attack

scene = cache(Scene.open)
INFINITE = float("inf")


def control() -> None:
    """Checks that the honest answer is accepted unchanged; else a refusal would prove nothing."""
    store = MemoryStore()
    store.files |= scene().files()
    assert_same_outcomes([scene().ledger(store).receive(scene().plan, scene().client)], [scene().honest])


# ----------------------------------------------------------------------------------------- whose, and to what
def signed_by(key: Callable[[Scene], bytes]) -> str | None:
    return scene().taken(scene().files(key=key(scene())))


def other_signature(s: Scene) -> bytes:
    return CLIENTS(s.plan.orders[1])


def earlier_key(s: Scene) -> bytes:
    return CLIENTS(replace(s.order, round=s.order.round + 1))


def other_run(s: Scene) -> bytes:
    return key_of(b"another run's")(s.order)


def unsigned(s: Scene) -> bytes:
    return b""


def says(**manifest: Any) -> str | None:
    return scene().taken(scene().files(**manifest))


def another_client() -> str | None:
    return says(client=scene().plan.orders[1].client)


def replay() -> str | None:
    """Sends the files of an earlier round unchanged."""
    earlier, now = scene(), scene(1)
    files = {key.replace("rounds/00000", "rounds/00001"): value for key, value in earlier.files().items()}
    moved = {key.replace(str(earlier.base[-2:]), now.base[-2:]): value for key, value in files.items()}
    by_number = {f"{now.base}{key[key.rindex('.') :]}": value for key, value in moved.items()}
    return now.taken(by_number)


def replay_of_another_order() -> str | None:
    """Sends the files again in the same round, as an answer to an order that was drawn anew."""
    s = scene()
    other = replace(s.order, seed=s.order.seed + 1)
    drawn = replace(s, plan=replace(s.plan, orders=(other, *s.plan.orders[1:])), order=other)
    return drawn.taken(s.files())


def late(change: Callable[[Scene], dict[str, bytes]]) -> str | None:
    """Changes files after the round was closed. The merge has to get what the round was closed with, or nothing."""
    s, store = scene(), MemoryStore()
    store.files |= s.files()
    closed = s.closed(store)
    store.files |= change(s)
    found = s.merged(store, closed)
    if isinstance(found, ClientFailure):
        return None if found.stage == "validate" else f"counts as {found.stage}"
    try:
        assert_same_outcomes([found], [s.honest])
    except AssertionError:
        return "replaced what the round was closed with"
    return None


def another_answer(s: Scene) -> dict[str, bytes]:
    return s.files(payload=s.payload(lambda _, t: t * 90))


def garbage(s: Scene) -> dict[str, bytes]:
    return {f"{s.base}.json": b"\x00", f"{s.base}.safetensors": b""}


def first_answer_late() -> str | None:
    """Sends an answer after the round was closed without it."""
    s, store = scene(), MemoryStore()
    closed = s.closed(store)
    store.files |= s.files()
    found = s.merged(store, closed)
    return "came in after the round was closed" if isinstance(found, ClientUpdate) else None


def other_metrics_late() -> str | None:
    """Metrics decide weights in the mean, clocks and selection. Late ones change nothing, and make nobody fail."""
    s, store = scene(), MemoryStore()
    store.files |= s.files()
    closed = s.closed(store)
    honest = dict(s.merged(store, closed).metrics)  # type: ignore[union-attr]
    store.files |= s.files(metrics=s.metrics(seconds=99.0, loss=7.0))
    found = s.merged(store, closed)
    if isinstance(found, ClientFailure):
        return f"an answer that was accepted fails: {found.reason}"
    return None if dict(found.metrics) == honest else "the merge saw other metrics than the round was closed with"


def as_coordinator(stage: str) -> str | None:
    s, store = scene(), MemoryStore()
    store.files |= s.files(spec=None, sha256=None, stage=stage, reason="lost")
    found = s.ledger(store).receive(s.plan, s.client)
    honest_stages = ("prune", "train", "validate")
    if isinstance(found, ClientFailure) and found.stage in honest_stages:
        return None
    return f"said for the coordinator: {found}"


# ----------------------------------------------------------------------------------------------- what it holds
def holds(change: Callable[[Params], Params]) -> str | None:
    return scene().taken(scene().files(payload=scene().tensors(change)))


def raw(payload: bytes) -> str | None:
    return scene().taken(scene().files(payload=payload))


def first(params: Params, to: Callable[[Tensor], Tensor]) -> Params:
    name = next(n for n in params if not is_statistic(n))
    return {**params, name: to(params[name])}


def value(number: float, params: Params) -> Params:
    return first(params, lambda t: torch.full_like(t, number))


def renamed(params: Params) -> Params:
    name = next(iter(params))
    return {("x" + n if n == name else n): t for n, t in params.items()}


def exchanged(params: Params) -> Params:
    """Exchanges two tensors of different shapes. (With the same shape, the result would be a valid update.)"""
    names = list(params)
    one = names[0]
    other = next(n for n in names if params[n].shape != params[one].shape)
    return {**params, one: params[other], other: params[one]}


def added(params: Params) -> Params:
    return {**params, "more": torch.zeros(1)}


def left_out(params: Params) -> Params:
    return dict(list(params.items())[1:])


def statistics(name: str, number: float, params: Params) -> Params:
    assert any(n.endswith(name) for n in params), f"no {name} in {sorted(params)}"
    return {n: torch.full_like(t, number) if n.endswith(name) else t for n, t in params.items()}


def no_numbers(*shape: int) -> bytes:
    """A file without numbers, whose sizes overflow when they are multiplied."""
    said = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(said)) + said


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


def too_large() -> str | None:
    s = scene()
    return raw(encode({**s.honest.payload, "padding": torch.zeros(10**6)}))


def large_manifest() -> str | None:
    s = scene()
    files = s.files()
    return s.taken({**files, f"{s.base}.json": b" " * 2**24 + files[f"{s.base}.json"]})


def nested_manifest() -> str | None:
    s = scene()
    return s.taken({**s.files(), f"{s.base}.json": b'{"spec":' * 10**4 + b"0" + b"}" * 10**4})


def narrower() -> str | None:
    """A part of the sub-model that was sent, but not one that this client would train."""
    s = scene()
    layout = s.site.layout
    group = next(g for g in layout.groups if g != "classes" and layout.width(s.honest.spec, g) > 1)
    spec = SubmodelSpec.of({**s.honest.spec.kept, group: 1}, s.honest.spec.blocks)
    payload = take(s.honest.payload, layout, spec, have=s.honest.spec)
    return s.taken(s.files(spec=spec.to_json(), payload=encode({n: t.contiguous() for n, t in payload.items()})))


def wider() -> str | None:
    s = scene()
    return says(spec={"keep": {next(iter(s.site.layout.groups)): 10**6}, "blocks": None})


# ---------------------------------------------------------------------------------------------- what it claims
def measures(**metrics: float) -> str | None:
    return says(metrics=scene().metrics(**metrics))


def no_number() -> str | None:
    """NaN, which some JSON parsers accept. No signature can be computed over it, so the old one stays."""
    s = scene()
    files = s.files()
    said = json.loads(files[f"{s.base}.json"])
    text = json.dumps({**said, "metrics": {**said["metrics"], "loss": float("nan")}})
    assert "NaN" in text
    return s.taken({**files, f"{s.base}.json": text.encode()})


def unprintable() -> str | None:
    """Reasons are printed in terminals and logs, where a line break forges a line, and an override reverses one."""
    s, store = scene(), MemoryStore()
    reason = "out of\nmemory\x1b[2J\r\x07 \u202egnp.exe \u2066x\u2069 \x85 \u2028 done"
    store.files |= s.files(spec=None, sha256=None, stage="train", reason=reason)
    found = s.ledger(store).receive(s.plan, s.client)
    assert isinstance(found, ClientFailure), found
    odd = {f"U+{ord(c):04X}" for c in found.reason if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")}
    return f"the reason that is logged holds {', '.join(sorted(odd))}" if odd else None


def _attack(name: str, tries: str, run: Callable[..., str | None], *given: Any, **more: Any) -> Attack:
    return Attack(name, tries, "engine", partial(run, *given, **more))


WHOSE = (
    _attack("unsigned", "to answer for another client", signed_by, unsigned),
    _attack("signed by another client", "the same", signed_by, other_signature),
    _attack("signed with the key of another order", "to use a key again", signed_by, earlier_key),
    _attack("signed in another run", "the same", signed_by, other_run),
    _attack("wrong round", "to answer another round", says, round=1),
    _attack("wrong client", "to answer for another client", another_client),
    _attack("wrong order", "to answer another order", says, order="0" * 64),
    _attack("replay of an earlier round", "to give an old answer again", replay),
    _attack("replay to another order", "the same", replay_of_another_order),
    _attack("late: another answer", "to change what was accepted", late, another_answer),
    _attack("late: garbage", "to stop a run that goes on", late, garbage),
    _attack("late: the first answer", "to come after the round was closed", first_answer_late),
    _attack("late: other metrics", "to change weights, clocks and selection", other_metrics_late),
    _attack("speaks as pod", "to be asked again without end", as_coordinator, "pod"),
    _attack("speaks as straggler", "to be forgiven", as_coordinator, "straggle"),
    _attack("unprintable reason", "to forge lines of the log", unprintable),
)
HELD = (
    _attack("renamed tensors", "to smuggle tensors in", holds, renamed),
    _attack("exchanged tensors", "the same", holds, exchanged),
    _attack("a tensor more", "the same", holds, added),
    _attack("a tensor less", "to be merged in part", holds, left_out),
    _attack("another type", "to slip through checks of numbers", holds, partial(first, to=Tensor.half)),
    _attack("integers", "the same", holds, partial(first, to=Tensor.int)),
    _attack("another shape", "the same", holds, partial(first, to=lambda t: t[1:])),
    _attack("NaN", "to ruin the mean", holds, partial(value, float("nan"))),
    _attack("infinity", "the same", holds, partial(value, INFINITE)),
    _attack("numbers whose sums overflow", "the same, finite", holds, partial(value, 3e38)),
    _attack("negative variance", "to ruin normalisation", holds, partial(statistics, "running_var", -1.0)),
    _attack("huge variance", "the same", holds, partial(statistics, "running_var", 3e38)),
    _attack("huge mean", "the same", holds, partial(statistics, "running_mean", 3e38)),
    _attack("NaN in statistics", "the same", holds, partial(statistics, "running_mean", float("nan"))),
    _attack("a pickle", "to run code", raw, b"\x80\x04K\x01."),
    _attack("nothing of 2**63", "to crash the reader", raw, no_numbers(0, 2**63)),
    _attack("nothing of 2**65", "the same", raw, no_numbers(0, 2**62, 8)),
    _attack("a header without end", "to fill the memory", long_header),
    _attack("a header of many tensors", "the same", many_tensors),
    _attack("a large file", "the same", too_large),
    _attack("a large manifest", "the same", large_manifest),
    _attack("a manifest of many levels", "to crash the reader", nested_manifest),
    _attack("a narrower sub-model", "to train less than asked", narrower),
    _attack("a wider sub-model", "to write what it was not sent", wider),
    _attack("no sub-model", "to crash the reader", says, spec={"keep": 7}),
)
CLAIMED = (
    _attack("more samples", "to weigh more", says, num_examples=10**9),
    _attack("no samples", "to weigh nothing and count", says, num_examples=0),
    _attack("huge loss", "to steer selection and reports", measures, loss=1e308),
    _attack("huge negative loss", "the same", measures, loss=-1e308),
    _attack("NaN loss", "the same", no_number),
    _attack("no multiply-adds", "to be first behind over-provisioning", measures, macs=0.0),
    _attack("endless multiply-adds", "to stretch the simulated clock", measures, macs=1e18),
    _attack("endless steps", "to weigh more", measures, steps=1e18),
    _attack("no step", "to have trained nothing", measures, steps=0.0),
    _attack("endless memory", "to be given larger models", measures, free=1e18),
    _attack("no memory", "to be given smaller models", measures, free=0.0),
    _attack("endless seconds", "to steer the clock", measures, seconds=1e18),
    _attack("a metric more", "to write into reports", measures, client=7.0),
)
ATTACKS = (*WHOSE, *HELD, *CLAIMED)

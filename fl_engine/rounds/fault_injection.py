"""Injects faults (`rounds.faults`): dropouts, stragglers and Byzantine clients in a fraction of the assignments.

    `drop=0.2`: The client sends no update.
    `slow=0.1x5`: The assignment takes five times as long on the simulated clock.
    `nan=0.02`: One weight is NaN.
    `scale=0.02x100`: The change of the weights is multiplied by 100.
    `flip=0.02`: The change of the weights has the opposite sign.
    `corrupt=0.01`: The file of the update is damaged.
    `uphill=0.1`: The client trains with gradient ascent (`poisoning`).
    `backdoor=0.1`: The client trains a back door (`poisoning`).
    `always`: Faults affect the same clients in every round. Without `always`, each assignment's fault is random.

An assignment has at most one fault. Faults depend only on the seed, the round and the client, so all backends and
resumed runs have the same faults.

The coordinator injects the faults. Clients train honestly, and the store contains the honest updates. Validation,
deadlines and aggregation do not distinguish faulty updates from honest updates. If uploads use a codec, faulty weights
are encoded again. QSGD cannot encode NaN, so with QSGD the fault `nan` is reported as a failed training.

For `uphill` and `backdoor`, the coordinator trains the client again from the same weights. The change of the weights is
scaled to the norm of the client's honest change, or, with `uphill=0.1x2`, to twice this norm. The faulty update has the
metrics of the honest update.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import torch

from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.errors import ModelError, nearest
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.text import need_plain
from fl_engine.core.types import Assignment, ClientFailure, ClientResult, ClientUpdate, ParamLayout, Params, RoundPlan
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.exchange.manifest import Rejected, pack_result
from fl_engine.exchange.updates import decode_and_check, read_update
from fl_engine.rounds.acceptance import measure_movement
from fl_engine.rounds.poisoning import Poison, train_poisoned

Kind = Literal["drop", "slow", "nan", "scale", "flip", "corrupt", "uphill", "backdoor"]
WITH_FACTOR: tuple[Kind, ...] = ("slow", "scale")
POISONED: tuple[Kind, ...] = get_args(Poison)
"""Kinds of faults for which a client is trained again. Their factor is optional."""
CHANGE_WEIGHTS: tuple[Kind, ...] = ("nan", "scale", "flip", *POISONED)
REJECTED: tuple[Kind, ...] = ("nan", "corrupt")
"""Kinds of faults whose updates always fail validation."""
ALWAYS = "always"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    share: float
    times: float = 1.0


@dataclass(frozen=True)
class Faults:
    faults: tuple[Fault, ...] = ()
    always: bool = False
    """True if faults affect the same clients in every round."""

    @property
    def kinds(self) -> set[Kind]:
        return {fault.kind for fault in self.faults}


def parse(text: str | None) -> Faults:
    """Parse the option's value, such as `drop=0.2,slow=0.1x5,always`. Raises ValueError for an invalid value."""
    words = [word.strip() for word in text.split(",")] if text and text.strip() else []
    found = tuple(_fault(word) for word in words if word != ALWAYS)
    if len(Faults(found).kinds) < len(found):
        raise ValueError("each kind of fault must occur at most once")
    if sum(fault.share for fault in found) > 1 + 1e-9:
        raise ValueError("the fractions must add up to 1 or less")
    return Faults(found, ALWAYS in words)


def _fault(word: str) -> Fault:
    name, _, value = word.partition("=")
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    if name not in kinds:
        raise ValueError(f"unknown kind of fault {name!r}{nearest(name, (*kinds, ALWAYS))}")
    kind, (share, sign, times) = kinds[name], value.partition("x")
    try:
        need_plain([value])
        fault = Fault(kind, float(share), float(times) if sign else 1.0)
        factor_fits = kind in POISONED or bool(sign) == (kind in WITH_FACTOR)
        if not factor_fits or not 0 <= fault.share <= 1 or not 0 < fault.times < math.inf:
            raise ValueError
    except ValueError:
        factor = "[x<factor>]" if kind in POISONED else "x<factor>" if kind in WITH_FACTOR else ""
        wanted = f"{kind}=<fraction>{factor} with a fraction from 0 to 1{' and a factor above 0' if factor else ''}"
        raise ValueError(f"expected {wanted}") from None
    return fault


def fault_of(faults: Faults, seed: int, round: int, client: int, clients: int) -> Fault | None:
    """Return the fault of `client` in `round`, or None. `clients` is the number of clients in the fleet."""
    if not faults.faults:
        return None
    if faults.always:
        place = (_ranks(seed, clients)[client] + 0.5) / clients
    else:
        place = float(seeds.rng(seed, "fault", round, client).random())
    for fault in faults.faults:
        if place < fault.share:
            return fault
        place -= fault.share
    return None


@lru_cache(maxsize=16)
def _ranks(seed: int, clients: int) -> tuple[int, ...]:
    return tuple(int(rank) for rank in seeds.rng(seed, "fault").permutation(clients))


def run_with_faults(
    faults: Mapping[int, Fault], algorithm: Algorithm, rest: RoundPlan, backend: Backend
) -> Generator[ClientResult, None, None]:
    """Run the assignments of `rest`, a subset of the plan, in the backend. Skip clients that drop out. `faults` maps
    the clients of the whole plan to faults."""
    dropped = [a.client for a in rest.assignments if a.client in faults and faults[a.client].kind == "drop"]
    for client in sorted(dropped):
        yield ClientFailure(rest.round, client, "drop", "the client dropped out (rounds.faults)")
    rest = replace(rest, assignments=tuple(a for a in rest.assignments if a.client not in dropped))
    if rest.wanted is not None and faults:  # Request more updates, because the server will reject some.
        rejected = sum(fault.kind in REJECTED for fault in faults.values())
        rest = replace(rest, wanted=min(rest.wanted + rejected, rest.adopted + len(rest.assignments)))
    yield from backend.run(algorithm, rest)


def inject(
    fault: Fault | None,
    algorithm: Algorithm,
    result: ClientResult,
    assignment: Assignment,
    site: Site,
    device: str = "cpu",
) -> ClientResult:
    """Return the faulty result that the server receives instead of the honest `result`. `device` is the torch device of
    the server."""
    if fault is None or isinstance(result, ClientFailure):
        return result
    rules = replace(site.rules, algorithm=algorithm, seed=None)  # clients may have measured their free memory
    try:
        if fault.kind == "corrupt":
            manifest, value = pack_result(result, assignment)
            assert value is not None
            content = bytes(value)
            damaged = content[:-1] + bytes([content[-1] ^ 1])
            return read_update(manifest, lambda limit: damaged, assignment, rules)
        if fault.kind == "uphill" or fault.kind == "backdoor":
            observed = replace(site, free=result.metrics["free"])  # so that the client prunes the same sub-model
            poisoned = train_poisoned(fault.kind, algorithm, assignment, observed, device)
            if isinstance(poisoned, ClientFailure):
                return poisoned
            length, honest = (measure_movement(each, assignment, site.layout).weights for each in (poisoned, result))
            fault = replace(fault, times=fault.times * honest / length if length else 1.0)
            result = replace(result, spec=poisoned.spec, payload=poisoned.payload)
        if fault.kind in CHANGE_WEIGHTS:
            return decode_and_check(_changed(fault, assignment, result, site.layout), assignment, rules)
        return result
    except ModelError as error:
        message = f"codec.up cannot encode the weights with the injected fault: {error}"
        return ClientFailure(assignment.round, assignment.client, "train", message, "finite")
    except Rejected as error:
        return error.failure(assignment)


def _changed(fault: Fault, assignment: Assignment, update: ClientUpdate, layout: ParamLayout) -> ClientUpdate:
    """Return the update with faulty weights. The client's state is unchanged. Raises ModelError if the codec cannot
    encode the weights."""
    sent = take(assignment.payload, layout, update.spec, have=assignment.spec)
    trained = {name: update.payload[name] for name in layout.slots if name in update.payload}
    payload = {name: tensor.contiguous() for name, tensor in false_weights(fault, sent, trained).items()}
    return replace(update, payload=payload, encoded=coding.encode_update(assignment, update.spec, payload, layout))


def false_weights(fault: Fault, received: Params, trained: Params) -> Params:
    """Return the weights that a Byzantine client sends instead of `trained`, after receiving the weights `received`."""
    if fault.kind == "nan":
        first = next((name for name, tensor in trained.items() if tensor.is_floating_point()), None)
        if first is None:  # Integers cannot be NaN.
            return trained
        spoilt = trained[first].clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[0] = torch.nan
        return {**trained, first: spoilt}
    times = -1.0 if fault.kind == "flip" else fault.times
    # Do not change batch-norm statistics. Flipping or scaling a change can make a variance negative, and the server
    # rejects every update with a negative variance.
    return {
        name: tensor if is_statistic(name) else received[name] + times * (tensor - received[name])
        for name, tensor in trained.items()
    }

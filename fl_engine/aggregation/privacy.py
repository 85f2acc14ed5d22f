"""Client-level differential privacy: a noisy sum of clipped changes, and its epsilon (docs/guides/privacy.md).

The Gaussian mechanism on a sum (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
Algorithm 1 with the fixed-denominator estimator). All clients have the same weight. For each element

    new = old + (sum_m clip(p_m - old) + N(0, (noise_multiplier * clip)^2)) / expected holders

Neighbours are two fleets of which one has a client whose updates change nothing. The change of a sub-model counts as a
change of the whole model with zeros elsewhere, so the sums of neighbours differ by at most `clip`. Every element that
a client may have been sent gets noise, because the holders must stay hidden. The other elements keep their values.
These elements and the divisor follow from public facts (`Public`).

Rounds compose by Renyi differential privacy (Mironov, CSF 2017), computed by the library dp-accounting. If the
selection is secret and draws k of N uniformly without replacement, epsilon is smaller (Wang et al., AISTATS 2019,
Theorem 27). That theorem's neighbours differ in one client, so their sums differ by 2 * clip.

All randomness follows from the run's key by HMAC-SHA256 and none from the run's `seed`, which clients know: the
selection (`plan_seed`) and the noise (`noise_seed`, `noise`), whose bits are those of SHAKE-256 (FIPS 202).
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_engine.aggregation.averaging import Kind, Regions, change_of, norm_of
from fl_engine.core.contracts import Algorithm, KeepsClientState, Selector
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Device, ParamLayout, Params, Pool, RoundPlan, SubmodelSpec
from fl_engine.selection import ByCapacity, ResourceTable, Uniform
from fl_engine.selection.capacity import able, dispatched, eligible, round_size


@dataclass(frozen=True)
class Public:
    """What is known about a round without any client's data. A private aggregate uses only this and the noisy sum."""

    clients: int
    """Number of clients that were asked."""
    models: tuple[SubmodelSpec, ...]
    """The sub-models that a client may have been sent, assumed to be equally likely."""
    noise_seed: bytes | None
    """Secret: 256 bits, used only for this round's noise of this part."""
    moving: bool = False
    """The models give only sizes, because their channels change from round to round (FedRolex, Federated Dropout)."""

    @staticmethod
    def of(plan: RoundPlan, pool: Pool, *, moving: bool = False, part: str = "") -> Public:
        """Return a round's public facts. `part` names a model that is aggregated separately and needs its own noise."""
        seed = None if plan.noise_seed is None else _derived(plan.noise_seed, f"{plan.round} {part}")
        return Public(len(plan.orders), tuple(m.spec for m in pool if m.dispatched), seed, moving)


# -------------------------------------------------------------------------------------------------- the noise
STREAM = "shake256-box-muller-1"
"""The rule by which noise follows from a key. A resumed run must use the same rule, because a round must not be
released with two different noises."""
BLOCK = 2**18
"""Number of values drawn at a time: 2 MB of SHAKE-256's output."""


def noise_key(key: bytes, run: str) -> bytes:
    """Return the key of one run. `run` is unique and public, and separates runs that share a key."""
    return _derived(key, f"flexfleet noise {run}")


def noise_seed(key: bytes | None, round: int) -> bytes | None:
    """Return the value of `RoundPlan.noise_seed`."""
    return None if key is None else _derived(key, f"round {round}")


def plan_seed(key: bytes) -> int:
    """Return the seed of `plan`, 256 bits. Clients see only SHA-256 values of it, which cannot be inverted."""
    return int.from_bytes(_derived(key, "plan"), "little") | 2**255


def server_seed(aggregation: object, plan: RoundPlan) -> int:
    """Return the seed of the server's training after a merge. With secret selection it is not the seed of the first
    assignment, from which that client could recognise its place."""
    if isinstance(aggregation, Private) and aggregation.secret_selection and plan.noise_seed is not None:
        return int.from_bytes(_derived(plan.noise_seed, f"server {plan.round}"), "little")
    return plan.orders[0].seed


def noise(seed: bytes, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return standard normal float64 numbers for one tensor. `seed` has 256 secret bits, and `name` is unique for it.

    Box-Muller on uniform numbers of 53 bits, u in (0, 1] and v in [0, 1). No number exceeds 8.58 (probability 1e-17).
    """
    key, count = _derived(seed, name), math.prod(shape)
    drawn = [_normal(key, start // BLOCK, min(BLOCK, count - start)) for start in range(0, count, BLOCK)]
    return np.concatenate(drawn or [np.empty(0)]).reshape(tuple(shape))


def _normal(key: bytes, block: int, count: int) -> np.ndarray:
    pairs = (count + 1) // 2
    # The key's length is fixed, so SHAKE-256 of the key and a number is a keyed function of the number.
    raw = hashlib.shake_256(key + block.to_bytes(8, "little")).digest(16 * pairs)
    u, v = np.frombuffer(raw, dtype="<u8").reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((u + 1.0) * 2.0**-53))
    angle = v * (2 * math.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, purpose.encode(), "sha256")


# -------------------------------------------------------------------------------------------------- the sum
@dataclass(frozen=True)
class Private:
    """Hides whether any one client's data had a part in the global model. All clients have the same weight."""

    __pydantic_config__ = STRICT
    name: Literal["private"] = "private"
    clip: Positive = 1.0
    """C: largest L2 norm of an update's change."""
    noise_multiplier: Positive = 1.0
    """z: standard deviation of the noise, over C."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta for which epsilon is reported; well below one over the number of clients."""
    secret_selection: bool = False
    """Who takes part in a round stays secret. Epsilon is then smaller if `algorithm.selection` names `uniform` or
    `by_capacity`, and the same with any other selection, also with `selection: null`."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> NoisySum:
        return NoisySum(old, layout, public, self.clip, self.noise_multiplier)


class NoisySum:
    """An aggregate that holds one sum per element. Raises ConfigError without a secret noise seed."""

    def __init__(self, old: Params, layout: ParamLayout, public: Public, clip: float, noise_multiplier: float) -> None:
        if public.noise_seed is None:
            raise ConfigError("private aggregation needs a plan with a noise_seed from a secret key, got none")
        self._old = old
        self._layout = layout
        self._regions = Regions(old, layout)
        self._public = public
        self._noise_seed = public.noise_seed
        self._clip = clip
        self._noise_multiplier = noise_multiplier
        self.sum = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in old.items()}
        """The sum before the noise, which must not leave this object."""

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add one update's change with weight 1. Raises ModelError if it does not fit."""
        kind = self._regions.fit(payload, spec)
        norm, at = norm_of(payload, kind, self._old, self._regions), self._regions.of(kind)
        factor = self._clip / norm if norm > self._clip else 1.0
        for name, tensor in payload.items():
            self.sum[name][at[name]] += change_of(tensor, self._old[name][at[name]]).mul_(factor)

    @property
    def empty(self) -> bool:
        """Whether no client was asked. The noise is added even if all clients have failed."""
        return self._public.clients == 0

    def trained(self) -> Params:
        """Return masks (bool, shapes of the model) of the elements that some client may have been sent."""
        kinds = self._kinds()
        return {name: (self._holders(name, kinds) > 0).expand(old.shape) for name, old in self._old.items()}

    def result(self) -> Params:
        kinds, out = self._kinds(), {}
        for name, old in self._old.items():
            drawn, holders = torch.from_numpy(noise(self._noise_seed, name, old.shape)), self._holders(name, kinds)
            noisy = self.sum[name] + self._noise_multiplier * self._clip * drawn
            new = (old.double() + noisy / holders.clamp_min(1)).to(old.dtype)
            out[name] = torch.where(holders > 0, new, old)  # depends on the pool, not on who answered
        return out

    def _kinds(self) -> dict[Kind, float]:
        """Map each model that clients may have been sent to the expected number of clients."""
        kinds = {}
        for spec in self._public.models:
            names = tuple(n for n in self._old if self._layout.has_block(spec, self._layout.slots[n].block))
            kinds[spec, names] = self._public.clients / len(self._public.models)
        return kinds

    def _holders(self, name: str, kinds: dict[Kind, float]) -> Tensor:
        """Return the expected number of holders of each element, float64."""
        if not self._public.moving:
            return self._regions.total(name, kinds)
        sizes = {kind: math.prod(self._regions.shapes(kind).get(name, (0,))) for kind in kinds}
        held = sum(count * sizes[kind] for kind, count in kinds.items()) / self._old[name].numel()
        return torch.tensor(held, dtype=torch.float64)


# ---------------------------------------------------------------------------------------- what it cannot go with
def is_private(algorithm: Algorithm) -> bool:
    return _private(algorithm) is not None


def _private(algorithm: Algorithm) -> Private | None:
    found = getattr(algorithm, "aggregation", None)
    return found if isinstance(found, Private) else None


LEARN_NOTHING = (Uniform, ByCapacity, ResourceTable)
"""Selections whose `learn` is the identity."""

EXPOSED = {
    "rounds.norm_bound=null": "a bound from all updates decides whether one of them is merged",
    "rounds.over_provision=1": "the other updates decide whether one of them is merged",
    "rounds.quorum=0": "the other updates decide whether one of them is merged",
    "rounds.stop_simulated_s=null": "the number of rounds would depend on how long clients take",
    "fleet.trace=null": "who takes part would depend on how long other clients take",
    "evaluate.on=server": "each client would report what it measures on its own samples, without noise",
    "pretrain.reference=false": "the report would show activations (APoZ) of all clients' data",
    "partition.proxy_shared=false": "the server's proxy would be samples of its clients",
    "noise.labels=0": "the wrong labels would follow from a training on all clients' data",
    "run.secrets to a folder that outlives this machine, or to s3://another-bucket/prefix": (
        "the ledger is in run.remote, and its key would be lost with this machine"
    ),
}
"""Map the cure for a setting that exposes single clients to the reason."""


def _refuse(why: str, cure: str) -> None:
    raise ConfigError(f"algorithm.aggregation is private, but {why}. Set {cure}")


def check_settings(algorithm: Algorithm, known: bool, exposed: Mapping[str, bool]) -> None:
    """Raise ConfigError if a run would reveal more about its clients than the noisy sum.

    Args:
        algorithm: The configured algorithm. Nothing is checked unless its aggregation is private.
        known: Whether the algorithm belongs to this package, whose tests check what it learns from single clients.
        exposed: For each key of EXPOSED whether the configuration needs this cure.
    """
    private = _private(algorithm)
    if private is None:
        return
    check_state(private, algorithm)
    if not known:
        _refuse("what your own algorithm learns from single clients is not known", "another aggregation")
    if type(private) is not Private:
        _refuse(f"what {type(private).__name__} adds to it is not known", "algorithm.aggregation.name=private")
    for cure, holds in exposed.items():
        if holds:
            _refuse(EXPOSED[cure], cure)


def check_model(aggregation: object, layout: ParamLayout, pool: Pool) -> None:
    """Raise ConfigError if a private aggregation would not be private, or would be useless, with this network."""
    if not isinstance(aggregation, Private):
        return
    if any(m.static_bn for m in pool):
        _refuse("batch norm's statistics would be collected on all clients' data", "algorithm.static_bn=false")
    if any(is_statistic(name) for name in layout.slots):
        _refuse("the network has running statistics, whose noisy variances could be negative", "model.norm=batch")


def check_selection(aggregation: object, selection: Selector) -> None:
    """Raise ConfigError if a single client's update or failure influences who is asked next."""
    # A subclass may learn, so the type must be one of these exactly.
    if isinstance(aggregation, Private) and type(selection) not in LEARN_NOTHING:
        _refuse(
            f"the selection {type(selection).__name__} may learn from single clients",
            "algorithm.selection={name: uniform}, {name: by_capacity} or {name: resource_table}",
        )


def check_draw(aggregation: object, why: str) -> None:
    """Raise ConfigError for secret selection, because of an algorithm in which one selected client influences other
    clients' assignments (`why`). Replacing that client may move the sum by more than 2 * clip."""
    if isinstance(aggregation, Private) and aggregation.secret_selection:
        _refuse(f"{why}, so secret selection is not accounted for", "algorithm.aggregation.secret_selection=false")


def check_state(aggregation: object, algorithm: object) -> None:
    """Raise ConfigError if clients keep a state, because the server stores it without noise."""
    if isinstance(aggregation, Private) and isinstance(algorithm, KeepsClientState):
        _refuse(f"the server stores the client states of {type(algorithm).__name__} without noise", "another one")


# ------------------------------------------------------------------------------------------------- accounting
def epsilon(algorithm: Algorithm, fleet: Sequence[Device], pool: Pool, rounds: int) -> float | None:
    """Return the epsilon of this many rounds at the aggregation's delta, or None if it is not private.

    Without secret selection each client counts as taking part in every round. Raises EnvironmentFailure if the
    accounting library is not installed.
    """
    private = _private(algorithm)
    if private is None:
        return None
    sampled = _sampled(algorithm, fleet, pool) if private.secret_selection else None
    orders, spent = _one_round(private.noise_multiplier, sampled)
    return float(_library().rdp.compute_epsilon(orders, rounds * spent, private.delta)[0])


def _sampled(algorithm: Any, fleet: Sequence[Device], pool: Pool) -> tuple[int, int] | None:
    """Return (k, N) if the selection is known to draw k of N clients uniformly."""
    selection = type(getattr(algorithm, "selection", None))
    if selection not in (Uniform, ByCapacity):
        return None
    asked: Sequence[Device] = eligible(algorithm, fleet, pool)
    if selection is ByCapacity:
        asked = able(asked, pool[dispatched(pool)[0]].share)
    return min(round_size(algorithm.training.fraction, len(fleet)), len(asked)), len(asked)


@lru_cache(maxsize=16)
def _one_round(noise_multiplier: float, sampled: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the orders alpha and the RDP epsilon(alpha) of one round, the smaller of two bounds if sampled."""
    library = _library()
    relation = library.NeighboringRelation
    whole = library.rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    whole.compose(library.GaussianDpEvent(noise_multiplier))
    if sampled is None:
        return whole.orders, whole.rdp
    k, eligible = sampled
    part = library.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    half = library.GaussianDpEvent(noise_multiplier / 2)  # the sensitivity is 2 * clip, not clip
    part.compose(library.SampledWithoutReplacementDpEvent(eligible, k, half))
    return whole.orders, np.minimum(whole.rdp, part.rdp)


def _library() -> ModuleType:
    try:
        import dp_accounting
    except ImportError as error:
        raise EnvironmentFailure(
            "private aggregation needs the package dp-accounting to compute epsilon: pip install 'flexfleet[privacy]'"
        ) from error
    return dp_accounting  # type: ignore[no-any-return]

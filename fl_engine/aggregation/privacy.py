"""Client-level differential privacy: a noisy sum of clipped changes, and what it costs in epsilon.

The Gaussian mechanism on a sum (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
Algorithm 1 with the fixed-denominator estimator). With every client counting alike,

    new = old + (sum_m clip(p_m - old) + N(0, (noise_multiplier * clip)^2)) / expected holders

element by element. Neighbours are two fleets of which one has a client whose updates change nothing. What a sub-model
changes is a change of the global model with zeros where the sub-model has nothing, and zeros add nothing to a norm: the
sums of neighbours differ by at most `clip`, whatever the client trained. Every element that a client may have been sent
gets noise, because who held an element must stay hidden; the others keep their values. Which elements these are, and
the divisor, follow from public facts (`Public`), so they reveal nothing.

Rounds compose by Renyi differential privacy (Mironov, CSF 2017), accounted by the library dp-accounting. Where who
takes part is secret and drawn uniformly, k of N without replacement, epsilon is smaller (Wang et al., AISTATS 2019,
Theorem 27; there, neighbours are two fleets that differ in one client, so that their sums differ by 2 * clip; a client
that changes nothing is such a replacement).

All randomness follows from the run's key by HMAC-SHA256, and nothing of it from the run's `seed`, which clients know:
who takes part (`plan_seed`), and the noise (`noise_seed`, `noise`), whose bits are those of SHAKE-256 (FIPS 202).

docs/guides/privacy.md says what this promises, and what it does not.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_engine.aggregation.averaging import Kind, Regions, change_of, norm_of
from fl_engine.core.contracts import Algorithm, KeepsClientState, Selector, Terms
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Device, ParamLayout, Params, Pool, RoundPlan, SubmodelSpec
from fl_engine.selection import ByCapacity, ResourceTable, Uniform
from fl_engine.selection.capacity import able, dispatched, eligible, round_size


@dataclass(frozen=True)
class Public:
    """What one knows of a round without knowing any client's data. A private aggregate uses this and the noisy sum, and
    nothing else."""

    clients: int
    """How many were asked."""
    models: tuple[SubmodelSpec, ...]
    """The sub-models that each of them may have been sent. Each is assumed to be equally likely."""
    noise_seed: bytes | None
    """Secret: 256 bits, used for this round's noise of this part alone."""
    moving: bool = False
    """The models say sizes alone: where in the network they lie changes from round to round (FedRolex, Federated
    Dropout)."""

    @staticmethod
    def of(plan: RoundPlan, pool: Pool, *, moving: bool = False, part: str = "") -> Public:
        """`part` tells models apart that are aggregated by themselves: no two may have the same noise."""
        seed = None if plan.noise_seed is None else _derived(plan.noise_seed, f"{plan.round} {part}")
        return Public(len(plan.orders), tuple(m.spec for m in pool if m.dispatched), seed, moving)


# -------------------------------------------------------------------------------------------------- the noise
STREAM = "shake256-box-muller-1"
"""Names the rule by which noise follows from a key. A run keeps the rule that it began with: a round that is computed
again with another rule would be released twice, with two different noises."""
BLOCK = 2**18
"""Values that are drawn at a time: 2 MB of SHAKE-256's output."""


def noise_key(key: bytes, run: str) -> bytes:
    """The key of one run. `run`, unique and not secret, tells it from another run that is given the same key."""
    return _derived(key, f"flexfleet noise {run}")


def noise_seed(key: bytes | None, round: int) -> bytes | None:
    """For `RoundPlan.noise_seed`."""
    return None if key is None else _derived(key, f"round {round}")


def plan_seed(key: bytes) -> int:
    """What `plan` takes for a seed: 256 bits. What clients get to see of it are single values of SHA-256 (the seeds of
    their own orders), from which nobody finds the way back."""
    return int.from_bytes(_derived(key, "plan"), "little") | 2**255


def server_seed(aggregation: object, plan: RoundPlan) -> int:
    """What the server's own training after a round's merge draws from. Where who takes part is secret it is not the
    seed of the first order: that order's client knows it, and could tell from the model that it was the first one."""
    if isinstance(aggregation, Private) and aggregation.secret_selection and plan.noise_seed is not None:
        return int.from_bytes(_derived(plan.noise_seed, f"server {plan.round}"), "little")
    return plan.orders[0].seed


def noise(seed: bytes, name: str, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers, float64, for one tensor. `seed`: 256 secret bits, with which no two tensors have the
    same `name`.

    Box-Muller on uniform numbers of 53 bits, u in (0, 1] and v in [0, 1); none lies beyond 8.58 (probability 1e-17).
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
    """Who takes part in a round stays secret: epsilon is then smaller if `algorithm.selection` names `uniform` or
    `by_capacity`. With any other selection, and with `selection: null`, even if that is a uniform draw, epsilon stays
    as large as without."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> NoisySum:
        return NoisySum(old, layout, public, self.clip, self.noise_multiplier)


class NoisySum:
    """An aggregate (`aggregation.Aggregate`). Streams: holds one sum per element.

    Raises ConfigError without a noise seed: whoever knows where noise comes from can take it off again.
    """

    def __init__(self, old: Params, layout: ParamLayout, public: Public, clip: float, noise_multiplier: float) -> None:
        if public.noise_seed is None:
            raise ConfigError(
                "private aggregation needs a noise_seed in the round's plan, drawn from a secret key; there is none"
            )
        self._old = old
        self._layout = layout
        self._regions = Regions(old, layout)
        self._public = public
        self._noise_seed = public.noise_seed
        self._clip = clip
        self._noise_multiplier = noise_multiplier
        self.sum = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in old.items()}
        """The sum before the noise: nobody may see it."""

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Adds one update's change; every weight counts as 1. Raises ModelError for one that does not fit."""
        kind = self._regions.fit(payload, spec)
        norm, at = norm_of(payload, kind, self._old, self._regions), self._regions.of(kind)
        factor = self._clip / norm if norm > self._clip else 1.0
        for name, tensor in payload.items():
            self.sum[name][at[name]] += change_of(tensor, self._old[name][at[name]]).mul_(factor)

    @property
    def empty(self) -> bool:
        """Whether nobody was asked. Where all clients have failed, the noise is added all the same."""
        return self._public.clients == 0

    def trained(self) -> Params:
        """bool, shaped like the model: the elements that some client may have been sent."""
        kinds = self._kinds()
        return {name: (self._holders(name, kinds) > 0).expand(old.shape) for name, old in self._old.items()}

    def result(self) -> Params:
        kinds, out = self._kinds(), {}
        for name, old in self._old.items():
            drawn, holders = torch.from_numpy(noise(self._noise_seed, name, old.shape)), self._holders(name, kinds)
            noisy = self.sum[name] + self._noise_multiplier * self._clip * drawn
            new = (old.double() + noisy / holders.clamp_min(1)).to(old.dtype)
            out[name] = torch.where(holders > 0, new, old)  # by the pool alone, whoever answered
        return out

    def _kinds(self) -> dict[Kind, float]:
        """The models that clients may have been sent, and how many clients were sent each on average."""
        kinds = {}
        for spec in self._public.models:
            names = tuple(n for n in self._old if self._layout.has_block(spec, self._layout.slots[n].block))
            kinds[spec, names] = self._public.clients / len(self._public.models)
        return kinds

    def _holders(self, name: str, kinds: dict[Kind, float]) -> Tensor:
        """float64: how many clients hold each element on average; 0 where none can."""
        if not self._public.moving:
            return self._regions.total(name, kinds)
        sizes = {kind: math.prod(self._regions.shapes(kind).get(name, (0,))) for kind in kinds}
        held = sum(count * sizes[kind] for kind, count in kinds.items()) / self._old[name].numel()
        return torch.tensor(held, dtype=torch.float64)


# ------------------------------------------------------------------------------------------- what it must not meet
def is_private(algorithm: Algorithm) -> bool:
    return _private(algorithm) is not None


def _private(algorithm: Algorithm) -> Private | None:
    """The algorithm's aggregation, where that is private; None: it is not, or the algorithm has none."""
    found = getattr(algorithm, "aggregation", None)
    return found if isinstance(found, Private) else None


def check_model(aggregation: object, layout: ParamLayout, pool: Pool) -> None:
    """Raises ConfigError where a private aggregation would not be private, or would be useless, with this network."""
    if not isinstance(aggregation, Private):
        return
    if any(m.static_bn for m in pool):
        raise ConfigError(
            "algorithm.aggregation is private, but batch norm's statistics would be collected on all clients' data as "
            "they are: set algorithm.static_bn=false"
        )
    if any(is_statistic(name) for name in layout.slots):
        raise ConfigError(
            "algorithm.aggregation is private, and the network keeps running statistics; with noise, variances would "
            "fall below zero: set model.norm=batch"
        )


LEARN_NOTHING = (Uniform, ByCapacity, ResourceTable)
"""Selections whose `learn` is the identity."""


def check_selection(aggregation: object, selection: Selector) -> None:
    """Raises ConfigError where a single client's update or failure decides who is asked next: no noise hides that."""
    # A subclass may learn, so the type must be one of these exactly.
    if isinstance(aggregation, Private) and type(selection) not in LEARN_NOTHING:
        raise ConfigError(
            f"algorithm.aggregation is private, but the selection {type(selection).__name__} learns from single "
            "clients' answers, or is not known to learn nothing, which the next rounds would show: set "
            "algorithm.selection={name: uniform}, {name: by_capacity} or {name: resource_table}"
        )


def check_draw(aggregation: object, why: str) -> None:
    """Raises ConfigError for secret selection. For algorithms in which one client that is drawn decides about others'
    orders: if another is drawn in its place, the sum may move by more than 2 * clip. `why` says how it decides."""
    if isinstance(aggregation, Private) and aggregation.secret_selection:
        raise ConfigError(
            f"{why}, for which no smaller epsilon is known: set algorithm.aggregation.secret_selection=false"
        )


def check_state(aggregation: object, algorithm: object) -> None:
    """Raises ConfigError where clients keep something: it leaves them, and is stored, without noise."""
    if isinstance(aggregation, Private) and isinstance(algorithm, KeepsClientState):
        raise ConfigError(
            f"algorithm.aggregation is private, but {type(algorithm).__name__} has its clients' states kept by the "
            "server, which sees each of them without noise: take another aggregation, or an algorithm that keeps none"
        )


def check_run(
    algorithm: Algorithm,
    *,
    known: bool,
    reference: bool,
    shared: bool,
    noisy: bool,
    timed: bool,
    stranded: bool,
) -> None:
    """Raises ConfigError where a run would show more of its clients than the noisy sum. `known`: the algorithm is one
    of this package; `reference`: pre-training on all data; `shared`: the server holds samples of its clients;
    `noisy`: some labels are wrong; `timed`: the simulated clock ends the run; `stranded`: a ledger that outlives
    this machine, and a key that does not."""
    if not is_private(algorithm):
        return
    check_state(_private(algorithm), algorithm)
    if not known:
        raise ConfigError(
            "algorithm.aggregation is private, but what an algorithm of your own learns from single clients is not "
            "known: add it to fl_engine.algorithms.ALGORITHMS, whose tests look at that, or take another aggregation"
        )
    if type(_private(algorithm)) is not Private:
        raise ConfigError(
            f"algorithm.aggregation is {type(_private(algorithm)).__name__}, which builds on private aggregation, but "
            "what it adds is not known to hide single clients: set algorithm.aggregation.name=private"
        )
    if reference:
        raise ConfigError(
            "algorithm.aggregation is private, but the report would show activations (APoZ) measured on all clients' "
            "data: set pretrain.reference=false"
        )
    if shared:
        raise ConfigError(
            "algorithm.aggregation is private, but the server's proxy would be samples of its clients, and what it "
            "computes from these has no noise: set partition.proxy_shared=false"
        )
    if noisy:
        raise ConfigError(
            "algorithm.aggregation is private, but which labels of a client become wrong would follow from a training "
            "on all clients' data, which has no noise: set noise.labels=0"
        )
    if timed:
        raise ConfigError(
            "algorithm.aggregation is private, but the number of rounds would depend on how long clients took, hence "
            "on how many samples they hold: set rounds.stop_simulated_s=null"
        )
    if stranded:
        raise ConfigError(
            "algorithm.aggregation is private, and the run's ledger is in run.remote; its key would be in the run's "
            "folder, and without it nobody can go on with the run: set run.secrets to a folder that outlives this "
            "machine, or to s3://another-bucket/prefix"
        )


def check_terms(algorithm: Algorithm, terms: Terms) -> None:
    """Raises ConfigError where it depends on the others' updates whether one is taken: the sum of neighbours would then
    differ in more than one client."""
    if not is_private(algorithm):
        return
    kept = {
        "norm_bound=null": terms.bound is None,
        "over_provision=1": terms.over_provision == 1,
        "quorum=0": terms.quorum == 0,
    }
    wrong = [f"rounds.{setting}" for setting, kept_to in kept.items() if not kept_to]
    if wrong:
        raise ConfigError(
            "algorithm.aggregation is private, so the others' updates must not decide whether one is taken: set "
            + ", ".join(wrong)
        )


def check_trace(algorithm: Algorithm, traced: bool) -> None:
    """Raises ConfigError where a trace says who is online: which clients a round asks would depend on how long those
    before it took, hence on how many samples their clients hold; and a draw among those that are online is no draw
    among all."""
    if traced and is_private(algorithm):
        raise ConfigError(
            "algorithm.aggregation is private, so who takes part must not depend on how long others took: set "
            "fleet.trace=null"
        )


def check_evaluation(algorithm: Algorithm, on_clients: bool) -> None:
    """Raises ConfigError where clients report what they measure on their own samples: no noise hides that."""
    if on_clients and is_private(algorithm):
        raise ConfigError(
            "algorithm.aggregation is private, and evaluate.on=clients would tell what single clients measure on their "
            "own samples: set evaluate.on=server"
        )


# ------------------------------------------------------------------------------------------------- accounting
def epsilon(algorithm: Algorithm, fleet: Sequence[Device], pool: Pool, rounds: int) -> float | None:
    """The epsilon that this many rounds have spent, at the aggregation's delta; None: it is not private.

    Without secret selection each client counts as taking part in every round. Raises EnvironmentFailure where the
    accounting library is not installed.
    """
    private = _private(algorithm)
    if private is None:
        return None
    sampled = _sampled(algorithm, fleet, pool) if private.secret_selection else None
    orders, spent = _one_round(private.noise_multiplier, sampled)
    return float(_library().rdp.compute_epsilon(orders, rounds * spent, private.delta)[0])


def _sampled(algorithm: Any, fleet: Sequence[Device], pool: Pool) -> tuple[int, int] | None:
    """(k, N) if the selection draws k of N clients uniformly; None: it does not, or is not known to."""
    selection = type(getattr(algorithm, "selection", None))
    if selection not in (Uniform, ByCapacity):
        return None
    asked: Sequence[Device] = eligible(algorithm, fleet, pool)
    if selection is ByCapacity:
        asked = able(asked, pool[dispatched(pool)[0]].share)
    return min(round_size(algorithm.training.fraction, len(fleet)), len(asked)), len(asked)


@lru_cache(maxsize=16)
def _one_round(noise_multiplier: float, sampled: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """(orders alpha, RDP epsilon(alpha)) of one round; with a sample, at each order the smaller of two bounds."""
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

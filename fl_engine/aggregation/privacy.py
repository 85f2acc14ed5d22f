"""Client-level differential privacy: noisy sum of the clients' clipped updates, and epsilon (docs/guides/privacy.md).

Gaussian mechanism on a sum (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
Algorithm 1 with the fixed-denominator estimator). All clients have the same weight. For each element:

    new = old + (sum_m clip(p_m - old) + N(0, (noise_multiplier * clip)^2)) / expected holders.

Two neighbouring fleets differ in one client, whose updates are zero in one of the fleets. The weight change of a
sub-model counts as a change of the whole model that is zero in all other elements. The sums of neighbouring fleets
therefore differ by at most `clip`. Noise is added to every element that a client may have received, to hide which
clients hold an element. All other elements keep their values. The set of noisy elements and the divisor depend only on
public facts (`Public`).

The library dp-accounting composes epsilon over rounds by Renyi differential privacy (Mironov, CSF 2017). If the
selection is secret and draws k of N clients uniformly without replacement, epsilon is smaller (Wang et al., AISTATS
2019, Theorem 27). In this theorem, one client of a fleet is replaced by another client, so the sums of neighbouring
fleets differ by at most 2 * clip.

The seeds of the selection (`plan_seed`) and of the noise (`noise_seed`, `noise`) are derived from the run's key by
HMAC-SHA256. The run's `seed` is not used, because clients receive it. SHAKE-256 (FIPS 202) generates the noise.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_engine.aggregation.averaging import Kind, Regions, change_of, norm_of
from fl_engine.core.contracts import Algorithm, KeepsClientState, MeasuresClients, Selector
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Options, Positive
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import Device, ParamLayout, Params, Pool, RoundPlan, SubmodelSpec
from fl_engine.selection import ByCapacity, ResourceTable, Uniform
from fl_engine.selection.capacity import able, dispatched, eligible, round_size

Reference = Callable[[SubmodelSpec, Params, int], Params]
"""Function that trains the given weights of a sub-model on at most the given number of the server's samples."""


@dataclass(frozen=True)
class Public:
    """Facts about a round that private aggregates may use, because they do not depend on clients' data."""

    clients: int
    """Number of selected clients."""
    models: tuple[SubmodelSpec, ...]
    """Sub-models that a client may have received. All sub-models are assumed to be equally likely."""
    noise_seed: bytes | None
    """256-bit secret for the noise in this round and in this part of the model; None without a secret key."""
    moving: bool = False
    """True if `models` define only widths, and the channels change in every round (FedRolex, Federated Dropout)."""
    reference: Reference | None = None
    """Function that trains on the server's data. Private aggregates do not use this function."""

    @staticmethod
    def of(
        plan: RoundPlan, pool: Pool, *, moving: bool = False, part: str = "", reference: Reference | None = None
    ) -> Public:
        """Return the public facts of a round. `part` names a separately aggregated model, which gets separate noise."""
        seed = None if plan.noise_seed is None else _derived(plan.noise_seed, f"{plan.round} {part}")
        return Public(len(plan.assignments), tuple(m.spec for m in pool if m.dispatched), seed, moving, reference)


# -------------------------------------------------------------------------------------------------- the noise
STREAM = "shake256-box-muller-1"
"""Name of the algorithm that generates noise from a key. A resumed run must use the same algorithm, because two results
of the same round with different noise would reveal more about the clients."""
BLOCK = 2**18
"""Number of values that are generated together (2 MB of SHAKE-256 output)."""


def noise_key(key: bytes, run: str) -> bytes:
    """Return the noise key of a run. `run` is a unique public name, so runs with the same `key` get different noise."""
    return _derived(key, f"flexfleet noise {run}")


def noise_seed(key: bytes | None, round: int) -> bytes | None:
    """Return `RoundPlan.noise_seed` for a round, or None without a key."""
    return None if key is None else _derived(key, f"round {round}")


def plan_seed(key: bytes) -> int:
    """Return the 256-bit seed for `Algorithm.plan`. Clients receive only SHA-256 hashes of this seed."""
    return int.from_bytes(_derived(key, "plan"), "little") | 2**255


def server_seed(aggregation: object, plan: RoundPlan) -> int:
    """Return the seed for the server's training after a merge. By default, this is the seed of the first assignment.
    With secret selection, it is a derived seed, because the first client could recognise the seed of its assignment."""
    if isinstance(aggregation, Private) and aggregation.secret_selection and plan.noise_seed is not None:
        return int.from_bytes(_derived(plan.noise_seed, f"server {plan.round}"), "little")
    return plan.assignments[0].seed


def noise(seed: bytes, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return standard normal float64 values for one tensor. Use each pair of a 256-bit `seed` and a `name` only once.

    Uses the Box-Muller transform with uniform 53-bit values u in (0, 1] and v in [0, 1). All magnitudes are below 8.58.
    """
    key, count = _derived(seed, name), math.prod(shape)
    drawn = [_normal(key, start // BLOCK, min(BLOCK, count - start)) for start in range(0, count, BLOCK)]
    return np.concatenate(drawn or [np.empty(0)]).reshape(tuple(shape))


def _normal(key: bytes, block: int, count: int) -> np.ndarray:
    pairs = (count + 1) // 2
    # The key has a fixed length, so SHAKE-256 of the key and the block number is a pseudorandom function.
    raw = hashlib.shake_256(key + block.to_bytes(8, "little")).digest(16 * pairs)
    u, v = np.frombuffer(raw, dtype="<u8").reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((u + 1.0) * 2.0**-53))
    angle = v * (2 * math.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, purpose.encode(), "sha256")


# -------------------------------------------------------------------------------------------------- the sum
@dataclass(frozen=True)
class Private(Options):
    """Noisy sum that hides whether the data of a single client were used. All clients have the same weight."""

    name: Literal["private"] = "private"
    clip: Positive = 1.0
    """Maximum L2 norm C of an update's change."""
    noise_multiplier: Positive = 1.0
    """Standard deviation of the noise, divided by C."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Delta for which epsilon is reported. Choose a value well below 1 / (number of clients)."""
    secret_selection: bool = False
    """Keep secret which clients are selected in a round. This reduces epsilon if `algorithm.selection` is `uniform` or
    `by_capacity`, but not for other selections or `selection: null`."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> NoisySum:
        return NoisySum(old, layout, public, self)


class NoisySum:
    """Noisy sum of the clients' clipped weight changes. Raises ConfigError for a plan without a secret noise seed."""

    def __init__(self, old: Params, layout: ParamLayout, public: Public, options: Private) -> None:
        if public.noise_seed is None:
            raise ConfigError("a private aggregation requires a plan with a secret noise_seed, got None")
        self._old, self._layout, self._regions = old, layout, Regions(old, layout)
        self._public, self._noise_seed = public, public.noise_seed
        self._clip, self._noise_multiplier = options.clip, options.noise_multiplier
        self.sum = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in old.items()}
        """Sum before noise is added. Other objects must not read this sum."""

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add the update's clipped weight change. `weight` is ignored, because all clients have the same weight. Raises
        ModelError if the update does not match the model."""
        kind = self._regions.fit(payload, spec)
        norm, at = norm_of(payload, kind, self._old, self._regions), self._regions.of(kind)
        factor = self._clip / norm if norm > self._clip else 1.0
        for name, tensor in payload.items():
            self.sum[name][at[name]] += change_of(tensor, self._old[name][at[name]]).mul_(factor)

    @property
    def empty(self) -> bool:
        """True if no client was selected. Noise is added even if all selected clients fail."""
        return self._public.clients == 0

    def trained(self) -> Params:
        """Return boolean masks of the elements that a client may have received, in the shapes of the model."""
        kinds = self._kinds()
        return {name: (self._holders(name, kinds) > 0).expand(old.shape) for name, old in self._old.items()}

    def result(self) -> Params:
        kinds, out = self._kinds(), {}
        for name, old in self._old.items():
            drawn, holders = torch.from_numpy(noise(self._noise_seed, name, old.shape)), self._holders(name, kinds)
            noisy = self.sum[name] + self._noise_multiplier * self._clip * drawn
            new = (old.double() + noisy / holders.clamp_min(1)).to(old.dtype)
            out[name] = torch.where(holders > 0, new, old)  # `holders` is public, so it needs no noise.
        return out

    def _kinds(self) -> dict[Kind, float]:
        """Map each model in `Public.models` to the expected number of clients that receive the model."""
        kinds = {}
        for spec in self._public.models:
            names = tuple(n for n in self._old if self._layout.has_block(spec, self._layout.slots[n].block))
            kinds[spec, names] = self._public.clients / len(self._public.models)
        return kinds

    def _holders(self, name: str, kinds: dict[Kind, float]) -> Tensor:
        """Return the expected number (float64) of clients that hold each element."""
        if not self._public.moving:
            return self._regions.total(name, kinds)
        sizes = {kind: math.prod(self._regions.shapes(kind).get(name, (0,))) for kind in kinds}
        held = sum(count * sizes[kind] for kind, count in kinds.items()) / self._old[name].numel()
        return torch.tensor(held, dtype=torch.float64)


# -------------------------------------------------------------------------------------------- refused options
def is_private(algorithm: Algorithm) -> bool:
    return isinstance(getattr(algorithm, "aggregation", None), Private)


LEARN_NOTHING = (Uniform, ByCapacity, ResourceTable)

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
"""Map each recommended setting to the reason why other settings would expose single clients."""


def _refuse(why: str, cure: str) -> None:
    message = f"algorithm.aggregation is private, but {why}. Set {cure}"
    raise ConfigError(message, code="config.conflict", path=cure.partition("=")[0].partition(" ")[0])


def check_settings(algorithm: Algorithm, known: bool, exposed: Mapping[str, bool]) -> None:
    """Raise ConfigError if a run would reveal more about clients than the noisy sum.

    Args:
        algorithm: Configured algorithm. Nothing is checked if the algorithm's aggregation is not private.
        known: True if the algorithm is built in. Tests check what built-in algorithms learn from single clients.
        exposed: Map each key of EXPOSED to True if the configuration does not use the recommended setting.
    """
    private = getattr(algorithm, "aggregation", None)
    if not isinstance(private, Private):
        return
    if not known:
        _refuse("what your own algorithm learns from single clients is not known", "another aggregation")
    if type(private) is not Private:
        _refuse(f"what {type(private).__name__} adds to it is not known", "algorithm.aggregation.name=private")
    for cure, holds in exposed.items():
        if holds:
            _refuse(EXPOSED[cure], cure)


STATELESS = "model.norm=batch, or track_running_stats=False in your own network"


def check_start(algorithm: Any, selection: Selector, layout: ParamLayout, pool: Pool) -> None:
    """Raise ConfigError if a private aggregation does not support the network or algorithm. The network must not have
    running statistics, the selection must not learn from single clients, and clients must not have a state."""
    if not is_private(algorithm):
        return
    if any(m.static_bn for m in pool):
        _refuse("batch norm's statistics would be collected on all clients' data", "algorithm.static_bn=false")
    if any(is_statistic(name) for name in layout.slots):
        _refuse("the network has running statistics, whose noisy variances could be negative", STATELESS)
    if type(selection) not in LEARN_NOTHING:  # A subclass may learn from client data, so do not use `isinstance`.
        _refuse(
            f"the selection {type(selection).__name__} may learn from single clients",
            "algorithm.selection={name: uniform}, {name: by_capacity} or {name: resource_table}",
        )
    if algorithm.aggregation.secret_selection and algorithm.draw_matters:
        why = f"{algorithm.draw_matters}, so secret selection is not accounted for"
        _refuse(why, "algorithm.aggregation.secret_selection=false")
    name, other = type(algorithm).__name__, "algorithm.name to another one"
    if isinstance(algorithm, MeasuresClients):
        _refuse(f"{name} uses metrics of single clients, to which no noise is added", other)
    if isinstance(algorithm, KeepsClientState):
        _refuse(f"the server stores the client states of {name} without noise", other)


# ------------------------------------------------------------------------------------------------- accounting
def epsilon(algorithm: Algorithm, fleet: Sequence[Device], pool: Pool, rounds: int) -> float | None:
    """Return epsilon after `rounds` rounds for the aggregation's delta; None if the aggregation is not private.

    Without secret selection, each client is assumed to be selected in every round. Requires dp-accounting.
    """
    private = getattr(algorithm, "aggregation", None)
    if not isinstance(private, Private):
        return None
    from dp_accounting.rdp import compute_epsilon

    sampled = _sampled(algorithm, fleet, pool) if private.secret_selection else None
    orders, spent = _one_round(private.noise_multiplier, sampled)
    return float(compute_epsilon(orders, rounds * spent, private.delta)[0])


def _sampled(algorithm: Any, fleet: Sequence[Device], pool: Pool) -> tuple[int, int] | None:
    """Return k and N if the selection draws k of N clients uniformly, or None for any other selection."""
    selection = type(getattr(algorithm, "selection", None))
    if selection not in (Uniform, ByCapacity):
        return None
    devices: Sequence[Device] = eligible(algorithm, fleet, pool)
    if selection is ByCapacity:
        devices = able(devices, pool[dispatched(pool)[0]].share)
    return min(round_size(algorithm.training.fraction, len(fleet)), len(devices)), len(devices)


@lru_cache(maxsize=16)
def _one_round(noise_multiplier: float, sampled: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the orders alpha and the corresponding RDP epsilon(alpha) of one round. With sampling, epsilon is the
    smaller of the bounds with and without amplification by sampling."""
    import dp_accounting as library

    relation = library.NeighboringRelation
    whole = library.rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    whole.compose(library.GaussianDpEvent(noise_multiplier))
    if sampled is None:
        return whole.orders, whole.rdp
    k, eligible = sampled
    part = library.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    half = library.GaussianDpEvent(noise_multiplier / 2)  # Replacing a client changes the sum by up to 2 * clip.
    part.compose(library.SampledWithoutReplacementDpEvent(eligible, k, half))
    return whole.orders, np.minimum(whole.rdp, part.rdp)

"""What a private run does with each algorithm: its noise, its key, what one client can change for others, and the
settings that it refuses."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.aggregation import privacy
from fl_engine.aggregation.privacy import Private, epsilon
from fl_engine.aggregation.rules import Mean
from fl_engine.algorithms import ALGORITHMS, AdaptiveFL, FlexFL, HeteroFL
from fl_engine.backends import InProcess
from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.slicing import full_shapes, take
from fl_engine.core.types import ClientResult, Params, RoundPlan, SubmodelSpec
from fl_engine.exchange.client import Site
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Curiosity
from fl_engine.selection.capacity import level_of
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    Memory,
    TinyNet,
    assert_same_bits,
    context_of,
    failure_of,
    first_plan,
    start_of,
    tiny_fleet,
    tiny_site,
    update_of,
)
from fl_engine.training.evaluation import published
from flexfleet.config import load_config
from tests.harness.made_up import without_fine_tuning

SECRET, OTHER = bytes(32), bytes([1] + [0] * 31)


def private(name: str, **more: Any) -> Any:
    kind: Any = ALGORITHMS[name]
    options: dict[str, Any] = {"depthfl": {"alpha": 0.0}, "heterofl": {"static_bn": False}}
    options["fedrolex"] = {"static_bn": False}
    options |= {"federated_dropout": {"static_bn": False}, "adaptivefl": {"variant": "random"}}
    options["dadaquant"] = {"phi": None, "q_min": 16}
    return without_fine_tuning(kind(training=TRAINING, aggregation=Private(**more), **options.get(name, {})))


def begun(algorithm: Any) -> tuple[Site, Any, RoundPlan]:
    site = tiny_site(algorithm)
    return site, start_of(algorithm, site), replace(first_plan(algorithm, site), noise_seed=SECRET)


def held_by(site: Site, specs: Sequence[SubmodelSpec]) -> dict[str, torch.Tensor]:
    """bool, shaped like the model: the elements that one of these sub-models has."""
    numbers = {n: torch.arange(math.prod(shape)).view(shape) for n, shape in full_shapes(site.family).items()}
    parts = [take(numbers, site.layout, spec) for spec in specs]
    own = {n: [numbers[n][:0], *(part[n] for part in parts if n in part)] for n in numbers}
    return {n: torch.isin(numbers[n], torch.cat([each.flatten() for each in own[n]])) for n in numbers}


REFUSED = ("ditto", "fedbn", "fednova", "fedper", "qffl", "scaffold")
"""Algorithms that learn more about single clients than the noisy sum reveals."""
PRIVATE = sorted(ALGORITHMS.keys() - REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_private_aggregation_is_refused_with_its_path(name: str) -> None:
    algorithm = private(name)
    with pytest.raises(ConfigError) as error:
        start_of(algorithm, tiny_site(algorithm))
    assert error.value.path in ("algorithm.aggregation", "algorithm.name")


@pytest.mark.parametrize("name", PRIVATE)
def test_private_merge_repeats_and_moves_every_sendable_element(name: str) -> None:
    algorithm = private(name)
    site, state, plan = begun(algorithm)
    trained = [update_of(o, o.spec, {n: t + 0.01 for n, t in o.payload.items()}) for o in plan.assignments]
    pooled = held_by(site, [model.spec for model in site.pool if model.dispatched])
    assert not any((held & ~pooled[n]).any() for n, held in held_by(site, [o.spec for o in plan.assignments]).items())
    for results in (trained, [failure_of(o) for o in plan.assignments]):
        merged = published(algorithm.merge(state, plan, results, ServerSite(site)))
        assert_same_bits(published(algorithm.merge(state, plan, results, ServerSite(site))), merged)
        for tensor_name, tensor in published(state).items():
            sent = pooled.get(tensor_name, torch.tensor(True))  # a level of its own is all sent
            assert torch.equal(merged[tensor_name] != tensor, sent.expand(tensor.shape)), tensor_name
        other = published(algorithm.merge(state, replace(plan, noise_seed=OTHER), results, ServerSite(site)))
        assert not any(torch.equal(other[n], merged[n]) for n in merged)
    with pytest.raises(ConfigError, match="noise_seed"):
        algorithm.merge(state, replace(plan, noise_seed=None), trained, ServerSite(site))


def test_levels_of_decoupled_have_noise_of_their_own() -> None:
    algorithm = private("decoupled", noise_multiplier=100.0)
    site, state, plan = begun(algorithm)
    merged = algorithm.merge(state, plan, [failure_of(o) for o in plan.assignments], ServerSite(site))
    small, large = merged.levels["0.5x/classifier.weight"], merged.levels["0.71x/classifier.weight"]
    assert not torch.isclose(small[0, 0], large[0, 0], rtol=0.01)


@pytest.mark.parametrize("name", ["flexfl", "decoupled"])
def test_resumed_private_run_has_same_noise_and_epsilon(name: str, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="pip install -e '.[privacy]'")
    algorithm = private(name)
    site = tiny_site(algorithm)

    def federate(folder: str, stop: int, key: bytes) -> tuple[Params, Memory]:
        config = RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, norm_bound=None)
        ledger, tracker, start = Ledger(FolderStore(tmp_path / folder)), Memory(), start_of(algorithm, site)
        final = rounds.federate(Run(algorithm, site, config, noise_key=key), start, InProcess(site), ledger, tracker)
        return dict(published(final)), tracker

    whole, tracker = federate("whole", 3, b"key")
    for stop in (1, 2):
        federate("stopped", stop, b"key")
    assert_same_bits(federate("stopped", 3, b"key")[0], whole)
    assert not any(torch.equal(tensor, whole[n]) for n, tensor in federate("other", 3, b"another")[0].items())
    logged = [tracker.rows[step]["epsilon"] for step in (1, 2, 3)]
    assert logged == [epsilon(algorithm, site.fleet, site.pool, r) for r in (1, 2, 3)]


# -------------------------------------------------------------------------------------------------------------- its key
class Idle:
    """A backend whose clients all fail at once; remembers what they were asked."""

    durable = False

    def __init__(self) -> None:
        self.plans: list[RoundPlan] = []

    def run(self, algorithm: Any, plan: RoundPlan) -> Iterator[ClientResult]:
        self.plans.append(plan)
        return (failure_of(assignment) for assignment in plan.assignments)


Asked = list[tuple[int, int, int]]


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Asked]:
    """(round, client, the order's seed) of a run in `folder`; stopped in the middle of its `stop_in`-th round."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[privacy]'")

    def run(name: str, folder: str, key: bytes | None, stop: int = 6, stop_in: int = 0, **more: Any) -> Asked:
        algorithm = private(name) if key else without_fine_tuning(ALGORITHMS[name](training=TRAINING))  # type: ignore[call-arg]
        site = tiny_site(algorithm)
        config = RoundsConfig(**{"stop": stop, "evaluate_every": 100, "commit_every": 1, "norm_bound": None} | more)
        backend, ledger, start = Idle(), Ledger(FolderStore(tmp_path / folder)), start_of(algorithm, site)
        given = (Run(algorithm, site, config, noise_key=key), start, backend, ledger, Memory())
        with suppress(Stopped):
            rounds.federate(*given, should_stop=lambda: len(backend.plans) == stop_in)
        return [
            (plan.round, assignment.client, assignment.seed)
            for plan in backend.plans
            for assignment in plan.assignments
        ]

    return run


@pytest.mark.parametrize("name", PRIVATE)
def test_private_selection_follows_from_key_not_seed(name: str, asked: Callable[..., Asked]) -> None:
    public, one, other = asked(name, "public", None), asked(name, "one", SECRET), asked(name, "other", OTHER)
    assert asked(name, "again", SECRET) == one
    for left, right in ((public, one), (one, other)):
        assert [pair[:2] for pair in left] != [pair[:2] for pair in right]
        assert not {seed for *_, seed in left} & {seed for *_, seed in right}


def test_nothing_that_a_private_run_stores_shows_its_key(tmp_path: Path, asked: Callable[..., Asked]) -> None:
    key = hashlib.sha256(b"a key").digest()
    asked("flexfl", "run", key, stop_in=4, keep_updates=True)
    secrets = [key, *(privacy.noise_seed(key, round) for round in range(6))]
    secrets += [privacy.plan_seed(key).to_bytes(32, assignment) for assignment in ("little", "big")]  # type: ignore[arg-type]
    plan = str(privacy.plan_seed(key)).encode()
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert any(path.name == "plan.json" for path in files) and len(files) > 3
    for path, value in files.items():
        forms = [plan, *(form for s in secrets if s for form in (s, s.hex().encode(), base64.b64encode(s)))]
        assert not [form for form in forms if form in value], path


# -------------------------------------------------------------------------------- what one client can change for others
@pytest.mark.parametrize("name", PRIVATE)
def test_one_clients_result_changes_no_later_private_plan(name: str) -> None:
    algorithm = private(name)
    site, state, plan = begun(algorithm)
    updates = [update_of(o, o.spec, dict(o.payload)) for o in plan.assignments]
    expected: Any = None
    for place, assignment in enumerate(plan.assignments):
        smallest = min(plan.assignments, key=lambda o: sum(t.numel() for t in o.payload.values()))
        for one in (failure_of(assignment), update_of(assignment, smallest.spec, dict(smallest.payload))):
            merged = algorithm.merge(state, plan, [*updates[:place], one, *updates[place + 1 :]], ServerSite(site))
            found = [
                [
                    (o.client, o.spec, o.seed, o.level, dict(o.hints))
                    for o in algorithm.plan(merged, context_of(site, r, SEED)).assignments
                ]
                for r in range(1, 9)
            ]
            expected = expected or found
            assert found == expected


@pytest.mark.parametrize("options", [{}, {"variant": "c"}, {"selection": Curiosity()}])
def test_selections_that_learn_from_single_clients_are_refused(options: dict[str, Any]) -> None:
    algorithm = AdaptiveFL(training=TRAINING, aggregation=Private(), **options)
    with pytest.raises(ConfigError, match=r"algorithm.selection"):
        start_of(algorithm, tiny_site(algorithm))
    start_of(replace(algorithm, aggregation=Mean()), tiny_site(algorithm))


ONE_DECIDES = ("adagq", "decoupled", "multibranch")
"""Algorithms in which one client that is drawn decides about others."""


@pytest.mark.parametrize("name", ONE_DECIDES)
def test_secret_selection_is_refused_if_clients_influence_others(name: str) -> None:
    algorithm = private(name, secret_selection=True)
    with pytest.raises(ConfigError, match=r"\.secret_selection=false"):
        start_of(algorithm, tiny_site(algorithm))
    start_of(private(name), tiny_site(algorithm))


@dataclass(frozen=True)
class Drawn:
    clients: tuple[int, ...]

    def pick(self, state: Any, context: Any, count: int, rng: Any) -> list[tuple[int, int]]:
        return [(c, level_of(context.fleet[c], context.pool) or 0) for c in self.clients]


@pytest.mark.parametrize("name", PRIVATE)
def test_one_client_does_not_change_other_assignments(name: str) -> None:
    algorithm = private(name, secret_selection=name not in ONE_DECIDES)
    fleet = tuple(replace(d, memory=200.0, speed=1e9 / (1 + d.client)) for d in tiny_fleet())
    site = tiny_site(algorithm, fleet=fleet)
    state = start_of(algorithm, site)

    def asked(first: int, samples: int) -> tuple[int, list[Any]]:
        """How many, and the orders of all but `first`."""
        held = tuple(samples if c == first else 8 for c in range(len(fleet)))
        drawn = Drawn(tuple(sorted((first, 4, 5, 6, 7))))
        among = algorithm if name == "decoupled" else replace(algorithm, selection=drawn)  # draws for each level
        assignments = among.plan(state, context_of(site, 0, samples=held, draws=held)).assignments
        others = [(o.client, o.level, o.spec, o.codecs, dict(o.hints)) for o in assignments if o.client != first]
        return len(assignments), others

    assert asked(0, 8000) == asked(0, 8)
    if name not in ONE_DECIDES:
        assert asked(19, 8) == asked(0, 8)


# ---------------------------------------------------------------------------------------------- settings that show more
PRIVATE = ("algorithm.aggregation={name: private}", "rounds.norm_bound=null")


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (["rounds.norm_bound=5.0"], "rounds.norm_bound=null"),
        (["rounds.over_provision=1.5", "rounds.quorum=0.5"], "rounds.over_provision=1"),
        (["rounds.quorum=0.5"], "rounds.quorum=0"),
        (["rounds.stop_simulated_s=100.0"], "rounds.stop_simulated_s=null"),
        (["fleet.trace={name: lognormal}"], "fleet.trace=null"),
        (["evaluate.on=clients"], "evaluate.on=server"),
        (["pretrain.reference=true"], "pretrain.reference=false"),
        (["partition.proxy_shared=true"], "partition.proxy_shared=false"),
        (["noise.labels=0.1"], "noise.labels=0"),
        (["algorithm.name=tests.laws.test_private_runs:OwnFlexFL"], "your own algorithm"),
    ],
)
def test_settings_that_show_more_than_the_noisy_sum_are_refused(sets: list[str], wanted: str) -> None:
    load_config(None, sets)
    load_config(None, PRIVATE)
    with pytest.raises(ConfigError, match=wanted):
        load_config(None, [*PRIVATE, *sets])


@dataclass(frozen=True)
class OwnFlexFL(FlexFL):
    """Somebody's own."""


def test_statistics_of_clients_data_are_refused() -> None:
    static = SmallCNN((1, 8, 8), 4, width=0.25, norm="static")
    for static_bn, family, path in ((True, TinyNet(), "algorithm.static_bn"), (False, static, "model.norm")):
        algorithm = HeteroFL(training=TRAINING, aggregation=Private(), static_bn=static_bn)
        with pytest.raises(ConfigError) as error:
            start_of(algorithm, tiny_site(algorithm, family))
        assert error.value.path == path

"""How much memory training each level takes, and which levels a device has room for."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import prepare_process
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.system import resident_peak
from fl_engine.core.types import ClientUpdate, Pool
from fl_engine.exchange.client import Site, execute
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TRAINING, first_plan, tiny_fleet, tiny_site
from fl_engine.training import memory
from fl_engine.training.memory import LevelTrial, Peaks, TrialSite
from fl_engine.training.numerics import SINGLE, Numerics
from flexfleet.pipeline.profile import check_prunes, trials_of

FLEXFL = FlexFL(training=TRAINING)
POOL = tiny_site(FLEXFL).pool
NEEDS = (45, 60, 80, 90, 100)
PEAKS = Peaks(100, tuple(100 + need for need in NEEDS))
"""The smallest level takes nearly half as much as the largest, whatever its share of the parameters."""
PREPARE = partial(prepare_process, ("cpu",))


def trained(observed: float, pool: Pool = POOL) -> int | None:
    """The largest level that a client trains that has so much free; None: it has no room for any."""
    return max((i for i, member in enumerate(pool) if observed > 100 * member.share), default=None)


def test_level_is_trained_if_its_peak_fits() -> None:
    for level, need in enumerate(NEEDS):
        assert trained(memory.free(need, PEAKS, POOL)) == level
        assert trained(memory.free(need - 1, PEAKS, POOL)) == (level - 1 if level else None)
    assert memory.free(0, PEAKS, POOL) == 0.0
    assert memory.free(10**6, PEAKS, POOL) == 10**6


def test_free_memory_between_two_levels_by_hand() -> None:
    """75 bytes lie three quarters of the way from the second level's 60 to the third's 80."""
    low, high = 100 * POOL[1].share, 100 * POOL[2].share
    assert memory.free(75, PEAKS, POOL) == pytest.approx(low + 0.75 * (high - low))
    assert memory.free(9, PEAKS, POOL) == pytest.approx(100 * POOL[0].share / 5)


@given(st.lists(st.integers(1, 10**12), min_size=5, max_size=5), st.lists(st.integers(0, 2 * 10**12), max_size=9))
def test_assignment_never_exceeds_the_free_memory(needs: list[int], rooms: list[int]) -> None:
    peaks, last = Peaks(7, tuple(7 + need for need in needs)), 0.0
    for room in sorted(rooms):
        observed = memory.free(room, peaks, POOL)
        assert last <= observed <= 1e15 and math.isfinite(observed), "more room is never less free"
        last, level = observed, trained(observed)
        assert level is None or max(needs[: level + 1]) <= room
        assert level == len(POOL) - 1 or max(needs[: (-1 if level is None else level) + 2]) > room


def images(count: int) -> Data:
    x = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(count) % 10
    return Data("images", Classification(10), x, y, x[:10], y[:10], (0.5,) * 3, (0.2,) * 3)


CNN, SAMPLES = SmallCNN((3, 32, 32), 10), 3000


def site_of_one_client(numerics: Numerics) -> tuple[Site, FedAvg]:
    training = Training(fraction=1.0, epochs=2, batch_size=10, drop_last=False)
    algorithm = FedAvg(training=training, eligible="all")
    site = tiny_site(algorithm, CNN, data=images(SAMPLES), sizes=(SAMPLES,), fleet=tiny_fleet(1))
    return replace(site, numerics=numerics), algorithm


def client_at_work(numerics: Numerics) -> tuple[int, int]:
    """In a process of its own that has read the data: (resident memory before, and at the peak of) a whole order."""
    PREPARE()
    site, algorithm = site_of_one_client(numerics)
    (assignment,) = first_plan(algorithm, site).assignments
    before = resident_peak()
    assert isinstance(execute(algorithm, assignment, site), ClientUpdate)
    return before, resident_peak()


@pytest.mark.long
@pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 8)], ids=["single", "batched"])
def test_client_uses_the_memory_that_was_measured(numerics: Numerics) -> None:
    """Its 3,000 images are 37 MB of float32, which lie twice in memory while they are normalised."""
    site, algorithm = site_of_one_client(numerics)
    run = Run(algorithm, site, RoundsConfig(stop=1))
    assignments = first_plan(algorithm, site).assignments
    (*_, whole) = trials_of(run, assignments)
    (planned,) = memory.level_peaks(TrialSite(CNN, site.data, SAMPLES, numerics, PREPARE), [whole]).needs
    before, peak = memory.in_child_process("a client", client_at_work, numerics)
    print(f"took {(peak - before) / 1e6:.1f} MB, planned {planned / 1e6:.1f} MB")
    assert peak - before < 1.03 * planned, "or a device with room for the plan alone runs out of memory"
    # The plan's process also reads more pages of torch's libraries than the client's: 25 to 30 MB here.
    assert planned < 1.5 * (peak - before)


def test_earlier_peaks_do_not_hide_the_memory_of_a_level() -> None:
    site, algorithm = site_of_one_client(SINGLE)
    run = Run(algorithm, site, RoundsConfig(stop=1))
    (*_, whole) = trials_of(run, first_plan(algorithm, site).assignments)
    found = [
        memory.measured(TrialSite(CNN, site.data, SAMPLES, SINGLE, partial(np.ones, numbers)), whole)
        for numbers in (1, 5 * 10**7)  # 400 MB, which are freed at once
    ]
    usual, after_a_peak = (peak - before for before, peak in found)
    assert after_a_peak == pytest.approx(usual, rel=0.3)


def trials(algorithm: Algorithm) -> tuple[Pool, list[LevelTrial]]:
    site = tiny_site(algorithm)
    run = Run(algorithm, site, RoundsConfig(stop=7))
    initial = algorithm.init(initial_params(site.family, 0), site.layout, site.fleet, site.pool, run.server)
    return site.pool, trials_of(run, algorithm.plan(initial, run.context(0, 0.0)).assignments)


def test_trials_train_levels_like_clients() -> None:
    pool, found = trials(FLEXFL)
    assert [(t.name, t.task.spec) for t in found] == [(m.name, m.spec) for m in pool]
    for i, trial in enumerate(found):
        assert trial.task.optimizer == TRAINING.optimizer_in(6), "the last round's"
        teachers = trial.task.distillation.teachers if trial.task.distillation else ()
        assert teachers == tuple(member.spec for member in pool[:i])
        sent = next(member for member in pool[i:] if member.dispatched)
        assert trial.sent == sent.spec, "an adaptive model is pruned from the next larger one"


def test_rule_that_ignores_the_free_memory_is_refused() -> None:
    site = tiny_site(FLEXFL)
    pool = tuple(replace(m, share=share) for m, share in zip(site.pool, (0.29, 0.44, 0.54, 0.92, 1.0), strict=True))

    def check(algorithm: FlexFL) -> None:
        run = Run(algorithm, replace(site, pool=pool), RoundsConfig(stop=7))
        initial = algorithm.init(initial_params(site.family, 0), site.layout, site.fleet, pool, run.server)
        check_prunes(run, algorithm.plan(initial, run.context(0, 0.0)).assignments)

    check(FLEXFL)
    with pytest.raises(ConfigError):
        check(replace(FLEXFL, rule="authors"))


def test_error_of_a_dead_process_names_the_level() -> None:
    _, (first, *_) = trials(FLEXFL)
    for ends in (partial(sys.exit, 9), partial(signal.raise_signal, signal.SIGKILL)):
        with pytest.raises(EnvironmentFailure, match="M1"):
            memory.level_peaks(TrialSite(CNN, images(10), 10, SINGLE, ends), [first])

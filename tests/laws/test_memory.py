"""How much memory training each level takes, and which levels a device has room for."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import replace
from functools import partial

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
from fl_engine.core.types import ClientUpdate, Pool
from fl_engine.exchange.client import Site, execute
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.vgg16 import VGG16
from fl_engine.preparation import assumed
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TRAINING, context_of, start_of, tiny_fleet, tiny_site
from fl_engine.training import memory
from fl_engine.training.memory import Peaks, Trial
from fl_engine.training.numerics import SINGLE, Numerics
from flexfleet.pipeline.level_memory import check_prunes, trials_of

FLEXFL = FlexFL(training=TRAINING)
POOL = tiny_site(FLEXFL).pool
NEEDS = (45, 60, 80, 90, 100)
PEAKS = Peaks(100, tuple(100 + need for need in NEEDS))
"""The smallest level takes nearly half as much as the largest, whatever its share of the parameters."""
PREPARE = partial(prepare_process, ("cpu",))


def trained(observed: float, pool: Pool = POOL) -> int | None:
    """The largest level that a client trains that has so much free; None: it has no room for any."""
    return max((i for i, member in enumerate(pool) if observed > 100 * member.share), default=None)


def test_a_level_is_trained_exactly_where_its_own_peak_has_room() -> None:
    for level, need in enumerate(NEEDS):
        assert trained(memory.free(need, PEAKS, POOL)) == level
        assert trained(memory.free(need - 1, PEAKS, POOL)) == (level - 1 if level else None)
    assert memory.free(0, PEAKS, POOL) == 0.0
    assert memory.free(10**6, PEAKS, POOL) == 10**6


def test_what_is_free_between_two_levels_by_hand() -> None:
    """75 bytes lie three quarters of the way from the second level's 60 to the third's 80."""
    low, high = 100 * POOL[1].share, 100 * POOL[2].share
    assert memory.free(75, PEAKS, POOL) == pytest.approx(low + 0.75 * (high - low))
    assert memory.free(9, PEAKS, POOL) == pytest.approx(100 * POOL[0].share / 5)


@given(st.lists(st.integers(1, 10**12), min_size=5, max_size=5), st.lists(st.integers(0, 2 * 10**12), max_size=9))
def test_an_order_never_exceeds_what_is_free(needs: list[int], rooms: list[int]) -> None:
    peaks, last = Peaks(7, tuple(7 + need for need in needs)), 0.0
    for room in sorted(rooms):
        observed = memory.free(room, peaks, POOL)
        assert last <= observed <= 1e15 and math.isfinite(observed), "more room is never less free"
        last, level = observed, trained(observed)
        assert level is None or max(needs[: level + 1]) <= room
        assert level == len(POOL) - 1 or max(needs[: (-1 if level is None else level) + 2]) > room


def test_what_levels_need_leaves_room_for_them() -> None:
    """A quarter more than the 100 bytes of a client and what training takes on top, of each client of a pod."""
    assert memory.needed(PEAKS, [1]) == 1.25 * 160
    assert memory.needed(PEAKS, [0, 4]) == math.ceil(1.25 * 245)
    for level in range(len(POOL)):
        assert trained(memory.free(memory.needed(PEAKS, [level]) - PEAKS.base, PEAKS, POOL)) >= level


VGG = VGG16((3, 32, 32), 10, width=0.25)
GOAL = Classification(10)
BATCH = 40


def images(count: int) -> Data:
    x = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(count) % 10
    return Data("images", GOAL, x, y, x[:10], y[:10], (0.5,) * 3, (0.2,) * 3)


DATA = images(10)


def flexfl_trials(kd_weight: float = 10.0) -> tuple[Pool, list[Trial]]:
    algorithm = FlexFL(training=Training(fraction=0.25, batch_size=BATCH), kd_weight=kd_weight, adaptive_size=None)
    site = replace(tiny_site(algorithm), family=VGG)
    pool = algorithm.pool(VGG, assumed(algorithm, VGG), None)  # type: ignore[arg-type]
    return pool, trials_of(Run(algorithm, replace(site, pool=pool), RoundsConfig()), ())


def test_a_process_that_dies_is_told_with_its_level() -> None:
    _, trials = flexfl_trials()
    with pytest.raises(EnvironmentFailure, match=r"M1.*exit code 9"):
        memory.level_peaks(VGG, DATA, trials[:1], 10, SINGLE, partial(sys.exit, 9))
    with pytest.raises(EnvironmentFailure, match="signal 9"):
        memory.level_peaks(VGG, DATA, trials[:1], 10, SINGLE, partial(signal.raise_signal, signal.SIGKILL))


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
    (order,) = algorithm.plan(start_of(algorithm, site), context_of(site, 0)).orders
    before = memory.resident_peak()
    assert isinstance(execute(algorithm, order, site), ClientUpdate)
    return before, memory.resident_peak()


@pytest.mark.long
@pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 8)], ids=["single", "batched"])
def test_a_client_takes_what_was_planned_for_it(numerics: Numerics) -> None:
    """Its 3,000 images are 37 MB of float32, which lie twice in memory while they are normalised."""
    site, algorithm = site_of_one_client(numerics)
    run = Run(algorithm, site, RoundsConfig(stop=1))
    orders = algorithm.plan(start_of(algorithm, site), context_of(site, 0)).orders
    (*_, whole) = trials_of(run, orders)
    (planned,) = memory.level_peaks(CNN, site.data, [whole], SAMPLES, numerics, PREPARE).needs
    before, peak = memory.in_child_process("a client", "", client_at_work, numerics)
    print(f"took {(peak - before) / 1e6:.1f} MB, planned {planned / 1e6:.1f} MB")
    assert peak - before < 1.03 * planned, "or a device with room for the plan alone runs out of memory"
    # Pages of torch's libraries are resident memory too: with files that were just written twice as many lie there.
    assert planned < 1.35 * (peak - before)


def trials(algorithm: Algorithm) -> tuple[Pool, list[Trial]]:
    site = tiny_site(algorithm)
    run = Run(algorithm, site, RoundsConfig(stop=7))
    initial = algorithm.init(initial_params(site.family, 0), site.layout, site.fleet, site.pool, run.server)
    return site.pool, trials_of(run, algorithm.plan(initial, run.context(0, 0.0)).orders)


def test_every_level_is_tried_as_its_client_trains_it() -> None:
    pool, found = trials(FLEXFL)
    assert [(t.name, t.task.spec) for t in found] == [(m.name, m.spec) for m in pool]
    for i, trial in enumerate(found):
        assert trial.task.optimizer == TRAINING.optimizer_in(6), "the last round's"
        teachers = trial.task.distillation.teachers if trial.task.distillation else ()
        assert teachers == tuple(member.spec for member in pool[:i])
        sent = next(member for member in pool[i:] if member.dispatched)
        assert trial.sent == sent.spec, "an adaptive model is pruned from the next larger one"


def test_a_rule_that_trains_what_is_larger_than_free_is_refused() -> None:
    site = tiny_site(FLEXFL)
    pool = tuple(replace(m, share=share) for m, share in zip(site.pool, (0.29, 0.44, 0.54, 0.92, 1.0), strict=True))

    def check(algorithm: FlexFL) -> None:
        run = Run(algorithm, replace(site, pool=pool), RoundsConfig(stop=7))
        initial = algorithm.init(initial_params(site.family, 0), site.layout, site.fleet, pool, run.server)
        check_prunes(run, algorithm.plan(initial, run.context(0, 0.0)).orders)

    check(FLEXFL)
    with pytest.raises(ConfigError, match=r"M2'.*44\.00 %"):
        check(replace(FLEXFL, rule="authors"))

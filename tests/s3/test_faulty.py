"""An S3 server that errs, hangs, breaks off or takes the keys away, in the middle of a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from tests.s3.conftest import Proxy

pytestmark = pytest.mark.parametrize("server", ["moto"], indirect=True)
MODE: dict[str, Any] = {"keep_updates": True, "stop": 3}


def test_run_survives_errors_timeouts_and_broken_answers(
    job: Any, proxy: Proxy, new_store: Callable[[], Store], timeless: Callable[[Store], list[Any]],
) -> None:  # fmt: skip
    """One request in eight goes wrong, in all ways; the run ends as if none had."""
    undisturbed = new_store()
    expected, rng = job.federate(undisturbed, **MODE), random.Random(7)
    ways: list[int | str] = [500, 503, 429, "cut", "lost", "half", "slow"]
    proxy.fault = lambda verb, headers: rng.choice(ways) if rng.random() < 1 / 8 else None
    store = S3Store("s3://runs/flaky", proxy.address)
    assert job.federate(store, **MODE) == expected
    assert timeless(store) == timeless(undisturbed)
    assert len(proxy.met) > 10 and len(set(proxy.met)) >= 5


@pytest.mark.parametrize("after", [3, 11, 24, 40])
def test_a_revoked_key_stops_the_run_and_a_new_one_goes_on(
    job: Any, proxy: Proxy, new_store: Callable[[], Store], timeless: Callable[[Store], list[Any]], after: int
) -> None:
    undisturbed = new_store()
    expected, left = job.federate(undisturbed, **MODE), [after]

    def revoked(verb: str, headers: object) -> int | None:
        left[0] -= 1
        return 403 if left[0] < 0 else None

    proxy.fault = revoked
    store = S3Store(f"s3://runs/revoked-{after}", proxy.address)
    with pytest.raises(EnvironmentFailure):
        job.federate(store, **MODE)
    proxy.fault = lambda verb, headers: None
    assert job.federate(store, **MODE) == expected
    assert timeless(store) == timeless(undisturbed)


def test_a_server_that_hangs_is_given_up_after_a_bounded_time(job: Any, proxy: Proxy) -> None:
    proxy.fault = lambda verb, headers: "cut"
    with pytest.raises(EnvironmentFailure):
        job.federate(S3Store("s3://runs/hanging", proxy.address, hasty=True), **MODE)
    assert len(proxy.met) == 2

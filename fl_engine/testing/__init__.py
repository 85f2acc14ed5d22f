"""Conformance test suites for built-in and user-defined algorithms, backends, codecs, networks and data sets."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fl_engine.training.isolation import isolated

# Without this call, pytest explains failed assertions only in test files.
NAMES = ("algorithms", "backends", "client_state", "codecs", "datasets", "models", "rounds", "tiny")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in NAMES))

# Examples may share function-scoped fixtures, because sites, states and networks are immutable.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.too_slow]
law = settings(max_examples=12, deadline=None, suppress_health_check=SHARED)
"""Settings for the property tests of all suites."""


class Suite:
    """Base class of suites that train. Each test restores torch's settings. A run flushes denormals to zero, and
    Hypothesis cannot draw floats with this setting."""

    @pytest.fixture(autouse=True)
    def restore_settings(self) -> Iterator[None]:
        with isolated():
            yield

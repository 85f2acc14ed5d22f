"""Conformance test suites for built-in and user-defined algorithms, codecs, networks and data sets."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fl_engine.training.isolation import isolated

SUITES = {
    "AlgorithmSuite": "algorithms", "ClientStateSuite": "client_state", "CodecSuite": "codecs",
    "DatasetSuite": "datasets", "ModelSuite": "models",
}  # fmt: skip
"""Map each suite to its module, which is imported when the suite is first used."""

# Without this call, pytest explains failed assertions only in test files.
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in (*SUITES.values(), "rounds", "tiny")))


def __getattr__(name: str) -> Any:
    if name not in SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{SUITES[name]}"), name)


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

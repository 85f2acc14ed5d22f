"""Conformance suites: what every algorithm, backend, codec, model and data set must hold to, also one of your own."""

import pytest

# pytest explains failed assertions in test files alone; these hold the assertions of others' test files.
pytest.register_assert_rewrite(
    "fl_engine.testing.algorithms",
    "fl_engine.testing.backends",
    "fl_engine.testing.checks",
    "fl_engine.testing.client_state",
    "fl_engine.testing.codecs",
    "fl_engine.testing.datasets",
    "fl_engine.testing.models",
    "fl_engine.testing.played",
    "fl_engine.testing.terms",
    "fl_engine.testing.tiny",
)

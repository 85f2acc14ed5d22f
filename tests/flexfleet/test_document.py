"""The schema explains itself: every parameter has a meaning, and names and choices are those that the types know."""

from __future__ import annotations

from typing import Literal

import pytest
import yaml

from fl_engine.core.fields import Section
from fl_engine.fleet.devices import FLEETS
from flexfleet.config import Config, document, flatten, parse
from flexfleet.config.document import WIDTH, about, choices, params_yaml

PATHS = [path for path in flatten(Config()) if path != "schema_version"]


@pytest.mark.parametrize("path", [*PATHS, "kubernetes.pools", "tune.space"])
def test_every_parameter_has_a_meaning(path: str) -> None:
    assert len(about(path)) > 5, "write it below the field"


def test_values_are_listed_where_they_are_few() -> None:
    rules = ("iid", "dirichlet", "dirichlet_per_client", "quantity", "disjoint_labels", "natural", "manual", "local")
    assert choices("partition.rule") == rules
    assert choices("run.strategy") == ("auto", "single", "batched"), "of a union too"
    assert choices("rounds.commit_every") == choices("seed") == choices("model.name") == ()
    assert about("partition.rule") == f"{', '.join(rules[:-1])} or {rules[-1]}."
    backends = "in_process, processes, kubernetes or agents. What trains the clients: "
    assert about("run.backend").startswith(backends), "before the field's own text"
    assert about("run.strategy").startswith("single: "), "not where the text has them all"
    assert about("fleet.tiers").endswith(f"The names: {', '.join(FLEETS)}.")
    assert about("tune.space").endswith("Each: {low, high, log, whole, choices}.")


def test_what_a_configuration_names_is_listed_from_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(document.NAMES, "dataset.name", {"b": None, "a": None})
    assert about("dataset.name") == "a, b, or package.module:NAME."
    assert "\n  name: digits # a, b, or package.module:NAME.\n" in params_yaml()


def test_the_text_is_the_defaults_and_fits_a_screen() -> None:
    text = params_yaml()
    assert parse(yaml.safe_load(text)) == Config()
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_section_is_told_by_its_fields() -> None:
    class Inner(Section):
        word: Literal["a", "b"] = "a"
        """What
        it means."""
        number: float = 1e-5
        several_of_them: tuple[int, ...] = (1, 2)
        """A meaning that is so long that it does not fit behind its parameter, and stands in a line above it."""

    assert list(document._section(Inner(), "x.", "  ")) == [
        "  word: a # a or b. What it means.",
        "  number: 1.0e-05",
        "  # A meaning that is so long that it does not fit behind its parameter, and stands in a line above it.",
        "  several_of_them: [1, 2]",
    ]

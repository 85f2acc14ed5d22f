"""params.yaml is the schema as text."""

from __future__ import annotations

from typing import Literal

import yaml

from fl_engine.core.fields import Section
from flexfleet.config import Config, parse
from flexfleet.config.parameters import choices, described, everything, hints
from flexfleet.config.params_file import WIDTH, params_yaml

ROWS = {row.name: row for row in everything() if not row.of}


def test_few_choices_are_listed_before_the_meaning() -> None:
    class Inner(Section):
        word: Literal["a", "b"] = "a"
        """What it means."""
        union: Literal["auto"] | Literal["x", "y"] | None = None
        """auto: x or y."""
        number: int | Literal["none"] = 1

    assert described(Inner, "word") == "a or b. What it means."
    assert choices(hints(Inner)["union"]) == ("auto", "x", "y") and described(Inner, "union") == "auto: x or y."
    assert choices(hints(Inner)["number"]) == ()
    assert ROWS["tune.space"].meaning.endswith("Each: {low, high, log, whole, choices}.")


def test_the_text_is_the_defaults_and_fits_a_screen() -> None:
    text = params_yaml()
    assert parse(yaml.safe_load(text)) == Config()
    assert max(map(len, text.splitlines())) <= WIDTH

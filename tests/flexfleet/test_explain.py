"""What is wrong with a configuration is told by the parameters' own names, with a hint that is true where it stands."""

from __future__ import annotations

import json
from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from flexfleet.config.explain import explain
from tests.harness.settings import refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tune.space={training.lr: {lo: 0.01, high: 1}}",
         "unknown parameter 'tune.space.training.lr.lo' (did you mean 'low'?)"),
        ("tune.space=3", "tune.space is a section, got 3: set a parameter in it, e.g. tune.space.<name>"),
        ("kubernetes.pools={weak: {selectr: {a: b}}}",
         "unknown parameter 'kubernetes.pools.weak.selectr' (did you mean 'selector'?)"),
        ("kubernetes.pools={weak: 3}", "kubernetes.pools.weak is a section, got 3: set a parameter in it, "),
        ("codec.up.bits=4",
         "unknown parameter 'codec.up.bits': codec.up.name=identity has no options; codec.up.name=qsgd has it"),
        ("algorithm.selection={name: uniform, exploration: 3}",
         "unknown parameter 'algorithm.selection.exploration' (known: model); algorithm.selection.name=oort has it"),
        ("codec.up={name: qsgd, bitz: 4}", "unknown parameter 'codec.up.bitz' (did you mean 'bits'?)"),
        ("publish.precision=[fp32, fp8]",
         "publish.precision.1: input should be 'fp32', 'fp16', 'int8' or 'int8_static', got 'fp8'"),
        ("publish.precision=[]",
         "publish.precision: input should be 'auto', or tuple should have at least 1 item after validation, not 0, got "
         "[]"),
        ("dataset.pad=x", "dataset.pad: input should be 'auto' or 'none', or a valid integer, got 'x'"),
        ("algorithm={name: multibranch, exits: 3}",
         "algorithm.exits: input should be a valid string, or a list, such as [3], got 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_a_hint_that_holds(given: str, said: str) -> None:
    told = refused(given)
    assert told.startswith(said) if said.endswith(" ") else told.endswith(said)
    assert ";" not in told.removesuffix(said), "one mistake is told once"


def test_kinds_inside_of_kinds_are_told_by_their_places() -> None:
    @dataclass
    class Inner:
        size: int

    nested = make_dataclass("Nested", [("size", int), ("pair", tuple[int | str, dict[str, Inner] | bool])])

    def told(values: Any) -> str:
        with pytest.raises(ValidationError) as error:
            TypeAdapter(nested).validate_json(json.dumps({"size": 1, "pair": values}), strict=True)
        return explain(error.value, nested, "own.")

    assert told((1.5, True)) == "own.pair.0: input should be a valid integer, or a valid string, got 1.5"
    assert (
        told((1, {"a.b": 3})) == "own.pair.1.a.b is a section, got 3: set a parameter in it, e.g. own.pair.1.a.b.<name>"
    )
    assert told((1, {"a.b": {"size": "x"}})) == "own.pair.1.a.b.size: input should be a valid integer, got 'x'"

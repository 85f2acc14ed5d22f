"""What is wrong with a configuration is told by the parameters' own names, with a hint that is true where it stands."""

from __future__ import annotations

import pytest

from tests.harness.settings import refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tune.space={training.lr: {lo: 0.01, high: 1}}",
         "unknown parameter 'tune.space.training.lr.lo' (did you mean 'low'?)"),
        ("kubernetes.pools={weak: {selectr: {a: b}}}",
         "unknown parameter 'kubernetes.pools.weak.selectr' (did you mean 'selector'?)"),
        ("codec.up.bits=4",
         "unknown parameter 'codec.up.bits': codec.up.name=identity has no options; codec.up.name=qsgd has it"),
        ("algorithm.selection={name: uniform, exploration: 3}",
         "unknown parameter 'algorithm.selection.exploration' (known: model); algorithm.selection.name=oort has it"),
        ("publish.precision=[fp32, fp8]",
         "publish.precision.1: input should be 'fp32', 'fp16', 'int8' or 'int8_static', got 'fp8'"),
        ("algorithm={name: multibranch, exits: 3}",
         "algorithm.exits: input should be a valid string, or a list, such as [3], got 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_a_hint_that_holds(given: str, said: str) -> None:
    told = refused(given)
    assert told.startswith(said) if said.endswith(" ") else told.endswith(said)
    assert ";" not in told.removesuffix(said), "one mistake is told once"

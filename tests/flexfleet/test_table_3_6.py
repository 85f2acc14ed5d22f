"""`flexfleet pool --flops-as thop`: the parameters, FLOPs and sizes of FedRolex's Table 3.6."""

from __future__ import annotations

from typing import Any

import pytest

CAPACITIES = ("--model", "preresnet18", "--input", "3x32x32", "--classes", "10", "--set",
              "algorithm.widths=[0.0625,0.125,0.25,0.5,1.0]", "--flops-as", "thop")  # fmt: skip
TABLE_3_6 = [(44_510, 2_413_184), (176_178, 9_151_744), (701_018, 35_604_992), (2_796_714, 140_416_000),
             (11_172_170, 557_656_064)]  # fmt: skip


@pytest.mark.parametrize("argv", [("--algorithm", "fedrolex"),
                                  ("--algorithm", "heterofl", "--set", "algorithm.rounding=floor"),
                                  ("--algorithm", "federated_dropout")])  # fmt: skip
def test_pool_prints_fedrolexs_table_3_6(flexfleet: Any, argv: tuple[str, ...]) -> None:
    """2.978 M parameters, 149.048 M FLOPs, 11.36 MB: the means over the five capacities."""
    found = flexfleet("pool", "--json", *argv, *CAPACITIES).json
    assert [(level["params"], level["flops"]) for level in found["levels"]] == TABLE_3_6
    assert found["mean"]["params"] == 2_978_118
    assert found["mean"]["flops"] == pytest.approx(149_048_396.8)
    assert f"{found['mean']['mib']:.2f}" == "11.36"
    text = flexfleet("pool", *argv, *CAPACITIES).out
    assert "2.978 M parameters, 149.048 M FLOPs, 11.36 MB" in text
    for params, flops in TABLE_3_6:
        assert any(f"{params:,}" in line and f"{flops / 1e6:.6f}" in line for line in text.splitlines())


def test_pool_counts_a_linear_layer_once_unless_asked_otherwise(flexfleet: Any) -> None:
    """The classifier of the full model: 512 x 10. The mean is over what is sent: not over a full model that nobody
    trains."""
    argv = ("--algorithm", "fedrolex", *CAPACITIES[:6], "--set", "algorithm.widths=[0.25,0.5]")
    once, twice = (flexfleet("pool", "--json", *argv, *more).json for more in ((), ("--flops-as", "thop")))
    assert [b["flops"] - a["flops"] for a, b in zip(once["levels"], twice["levels"], strict=True)] == [1280, 2560, 5120]
    assert twice["mean"]["params"] == (701_018 + 2_796_714) / 2 and "mean" not in once

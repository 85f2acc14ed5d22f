"""`flexfleet pool`: a pool without a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flexfleet.files.artifacts import PoolFile
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")


# --------------------------------------------------------------------------------------------------------- pool
VGG = ("--model", "vgg16", "--input", "3x32x32", "--classes", "10")
POOL = [
    ("--algorithm", "flexfl", *VGG, "--set", "algorithm.use_apoz=false"),
    ("--set", "algorithm.use_apoz=false", *VGG, "--algorithm", "flexfl"),
    ("--set", "algorithm.use_apoz=false", *VGG),
]


@pytest.mark.parametrize("argv", POOL)
def test_pool_of_the_papers_vgg16(flexfleet: Any, argv: tuple[str, ...]) -> None:
    found = flexfleet("pool", "--json", *argv).json
    levels = found["levels"]
    assert [level["name"] for level in levels] == ["M1", "M2'", "M2", "M3'", "M3"]
    assert levels[-1]["params"] == 33_646_666
    for level, percent in zip(levels, (25, 40, 50, 90, 100), strict=True):
        assert {"name", "params", "flops", "bytes", "widths"} <= level.keys()
        assert level["bytes"] == 4 * level["params"]
        assert abs(100 * level["params"] / 33_646_666 - percent) <= 0.5, level["name"]
        assert len(level["widths"]) == 15, "thirteen convolutions and two hidden layers"
    sizes = [(level["params"], level["flops"], *level["widths"].values()) for level in levels]
    for small, large in pairwise(sizes):
        assert all(a <= b for a, b in zip(small, large, strict=True))


def test_pool_of_the_control_has_one_model(flexfleet: Any) -> None:
    (level,) = flexfleet("pool", "--json", "--algorithm", "all_large", *VGG).json["levels"]
    assert level["params"] == 33_646_666


def test_pool_measures_on_the_configured_data(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    found = flexfleet("pool", "--json", sets=quick).json
    assert found["classes"] == 10
    assert found["input_chw"] == [1, 8, 8]
    assert list(tmp_path.iterdir()) == [], "the pool command leaves nothing behind"


def test_pool_takes_measured_scores(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, _ = finished
    done = flexfleet("pool", "--json", "--apoz", str(run / "pretrain" / "apoz.json"), sets=quick)
    assert PoolFile.model_validate(done.json) == PoolFile.read(run / "pool" / "pool.json")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (VGG, "--apoz"),
        (VGG[:4], "--classes"),
        (("--classes", "10"), "--input"),
        (("--model", "vgg16", "--input", "3x32", "--classes", "10"), "3x32"),
        (("--model", "vgg16", "--input", "3x32x32", "--classes", "0"), "at least 1; got 0"),
        (("--model", "vgg61"), "vgg16"),
        (("--apoz", "nowhere.json"), "nowhere.json"),
    ],
)
def test_pool_refuses(flexfleet: Any, argv: tuple[str, ...], said: str) -> None:
    done = flexfleet("pool", "--json", *argv)
    assert done.code in (2, 4)
    assert said in refused(done, done.code)


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

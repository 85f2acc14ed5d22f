"""The suites of AdaptiveFL (Jia et al., DAC 2024) say what its tables and figures say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from fl_engine.algorithms import HeteroFL, ScaleFL
from fl_engine.core.contracts import ModelFamily
from fl_engine.fleet.devices import FLEETS, Tier, fleet
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet18
from fl_engine.models.vgg16 import VGG16
from fl_engine.selection.capacity import level_of, round_size
from flexfleet.config.comparison_runs import Entry
from tests.flexfleet.test_suites import runs

LARGE = ("table2", "table3", "table4", "figure4", "figure5", "figure6")


@cache
def rows(name: str) -> dict[str, Entry]:
    return {entry.label: entry for entry in runs(f"adaptivefl/{name}", None, "0").values()}


def tiers_of(entry: Entry) -> tuple[Tier, ...]:
    return tuple(entry.config.fleet.tiers)


def algorithm(entry: Entry) -> Mapping[str, Any]:
    return entry.config.algorithm


@pytest.mark.parametrize("name", LARGE)
def test_what_section_4_says(name: str) -> None:
    """SGD at .01 with momentum .5, batches of 50, 5 local epochs, a tenth of 100 clients; code: 1,000 rounds, the best
    is printed, weight decay 1e-4, the rate falls by .998 a round, the last batch is dropped."""
    for label, entry in rows(name).items():
        t, r = entry.config.training, entry.config.rounds
        assert (t.lr, t.momentum, t.batch_size, t.epochs) == (0.01, 0.5, 50, 5)
        assert (t.weight_decay, t.lr_decay, t.drop_last) == (1e-4, 0.998, True)
        assert (r.stop, r.evaluate_every) == (1000, 1)
        partition = entry.config.partition
        if name == "figure6":
            assert partition.clients == 17 and round_size(t.fraction, partition.clients) == 10
        elif name == "figure4":
            assert partition.clients == int(label.rpartition("k")[2]) and t.fraction == 0.1
        else:
            assert partition.clients == (180 if "femnist" in label else 100) and t.fraction == 0.1


def test_table_2() -> None:
    found = rows("table2")
    of = Counter((entry.config.model["name"], entry.config.dataset.name) for entry in found.values())
    five = {("cifar10", 15), ("cifar100", 15), ("femnist", 5)}
    assert of == {(model, data): n for model in ("vgg16", "resnet18") for data, n in five}
    for label, entry in found.items():
        partition = entry.config.partition
        if label.endswith("femnist"):
            assert partition.rule == "natural"
        elif label.endswith("iid"):
            assert partition.rule == "iid"
        else:
            assert (partition.rule, partition.alpha) == ("dirichlet", float(label.rpartition("-")[2]))
        if label.startswith("adaptivefl"):
            assert tiers_of(entry) == FLEETS["adaptivefl_resnet18" if "resnet18" in label else "adaptivefl"]


def test_baselines_are_those_of_the_authors_code() -> None:
    """HeteroFL at widths .5/.71/1 without its additions, ScaleFL without distillation, both weighted by samples, a size
    drawn first; All-Large asks every client."""
    found = rows("table3")
    for case in ("433", "811", "181", "118"):
        hetero, scale = algorithm(found[f"heterofl-{case}"]), algorithm(found[f"scalefl-{case}"])
        assert list(hetero["widths"]) == [0.5, 0.71, 1.0]
        assert not (hetero["scaler"] or hetero["mask_labels"] or hetero["static_bn"])
        assert scale["kd_weight"] == 0 and hetero["weighting"] == scale["weighting"] == "examples"
        assert hetero["selection"]["name"] == scale["selection"]["name"] == "resource_table"
        assert algorithm(found[f"all_large-{case}"])["eligible"] == "all"


@pytest.mark.parametrize(
    ("network", "widths"),
    [
        (VGG16((3, 32, 32), 10), (0.75, 0.82, 1.0)),
        (VGG16((3, 32, 32), 10, width=0.25), (0.75, 0.82, 1.0)),
        (ResNet18((3, 32, 32), 100), (0.75, 0.82, 1.0)),
        (MobileNetV2((22, 20, 20), 9), (0.87, 0.89, 1.0)),
    ],
)
def test_a_baselines_class_holds_its_level_and_no_larger_one(network: ModelFamily, widths: tuple[float, ...]) -> None:
    for method in (HeteroFL(static_bn=False), ScaleFL(widths=widths)):
        family = method.network(network) if isinstance(method, ScaleFL) else network
        pool = method.pool(family, None, None)  # type: ignore[arg-type]
        devices = fleet(tiers_of(rows("figure6")["heterofl"]), 17, 0)
        held = {(device.tier, level_of(device, pool)) for device in devices}
        assert held == {("weak", 0), ("medium", 1), ("strong", 2)}
        assert all(device.sigma == 0 for device in devices), "what is sent is trained"


def test_table_3_has_its_proportions() -> None:
    shares = {"433": (0.4, 0.3, 0.3), "811": (0.8, 0.1, 0.1), "181": (0.1, 0.8, 0.1), "118": (0.1, 0.1, 0.8)}
    found = rows("table3")
    assert set(found) == {
        f"{row}-{case}" for row in ("all_large", "heterofl", "scalefl", "adaptivefl") for case in shares
    }
    for label, entry in found.items():
        assert tuple(tier.share for tier in tiers_of(entry)) == shares[label.rpartition("-")[2]]
        assert (entry.config.model["name"], entry.config.dataset.name) == ("vgg16", "cifar10")
        assert entry.config.partition.rule == "iid"
        if label.startswith("adaptivefl"):
            for own, published in zip(tiers_of(entry), FLEETS["adaptivefl"], strict=True):
                assert (own.name, own.speed) == (published.name, published.speed)
                assert own.limits is not None and published.limits is not None
                assert [own.memory, *own.sigma, *own.limits] == pytest.approx(
                    [published.memory, *published.sigma, *published.limits], rel=1e-5
                )

"""The suites of FedRolex (Alam 2023, chapter 3) say what its tables and figures say."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from fl_engine.algorithms import FedRolex
from fl_engine.core.augmentation import Crop, Flip
from fl_engine.core.costs import count_params
from fl_engine.core.widths import prefix
from fl_engine.fleet.devices import fleet
from fl_engine.models.layers import Norm
from fl_engine.models.preresnet import PreResNet18
from fl_engine.selection.capacity import level_of, round_size
from flexfleet.config.comparison_runs import Entry
from flexfleet.experiments import published_suites
from tests.flexfleet.test_suites import runs

LARGE = [
    name
    for name in published_suites.names()
    if name.startswith("fedrolex/") and not name.endswith(published_suites.SMALL)
]
SMALL = [
    name for name in published_suites.names() if name.startswith("fedrolex/") and name.endswith(published_suites.SMALL)
]
FIVE = (0.0625, 0.125, 0.25, 0.5, 1.0)
BOUNDS = ("smallest", "largest")


@cache
def rows(name: str) -> dict[str, Entry]:
    return {entry.label: entry for entry in runs(f"fedrolex/{name}", None, "0").values()}


def widths(entry: Entry) -> tuple[float, ...]:
    return tuple(entry.config.algorithm["widths"])


def network(entry: Entry, norm: Norm = "static") -> PreResNet18:
    return PreResNet18((3, 32, 32), 10, width=entry.config.model.get("width", 1.0), norm=norm)


def tiers_of(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry.config.fleet.tiers)


@pytest.mark.parametrize("name", [*LARGE, *SMALL])
def test_all_rows_train_on_equal_terms(name: str) -> None:
    """Static batch norm, the scaler, masked labels, one rate; weights alike, but for the rows that vary them."""
    found = rows(name.removeprefix("fedrolex/"))
    rates: dict[str, set[float]] = {}
    for entry in found.values():
        own, training = entry.config.algorithm, entry.config.training
        assert own["scaler"] and own["mask_labels"] and own["static_bn"]
        assert "table3.4" in name or own["weighting"] == "uniform"
        assert entry.config.model["name"] == "preresnet18" and entry.config.partition.rule == "disjoint_labels"
        assert (training.momentum, training.weight_decay, training.epochs, training.lr_decay) == (0.9, 5e-4, 1, 1.0)
        assert training.clip_norm == 1.0 and training.augment == (Crop(padding=4), Flip())
        rates.setdefault(entry.config.dataset.name, set()).add(training.lr)
    assert all(len(each) == 1 for each in rates.values())


@pytest.mark.parametrize("name", LARGE)
def test_what_tables_3_7_and_3_8_say_of_each_data_set(name: str) -> None:
    assert published_suites.load(name).seeds == (0, 1, 2, 3, 4), "five seeds (section 3.3)"
    for entry in rows(name.removeprefix("fedrolex/")).values():
        config = entry.config
        t, partition = config.training, config.partition
        ten = config.dataset.name == "cifar10"
        assert (t.batch_size, t.lr) == ((10, 2e-4) if ten else (24, 1e-4))
        assert partition.labels_per_client in ((2, 5) if ten else (20, 50)) and partition.clients == 100
        assert name == "fedrolex/table3.5" or round_size(t.fraction, 100) == 10


@pytest.mark.parametrize(("table", "shares"), [("table3.2", (20,) * 5), ("table3.3", (6, 10, 11, 18, 55))])
def test_every_capacity_is_asked_for_its_own_width(table: str, shares: tuple[int, ...]) -> None:
    """Fig. 3.7: 6, 10, 11, 18 and 55 of 100 clients hold 1, 1/2, 1/4, 1/8 and 1/16. The small twins' networks too."""
    for small in ("", "-small"):
        entry = rows(f"{table}{small}")["fedrolex-high"]
        assert widths(entry) == FIVE and widths(rows(f"{table}{small}")["heterofl-low"]) == FIVE
        family = network(entry)
        pool = FedRolex(widths=FIVE).pool(family, None, None)  # type: ignore[arg-type]
        held = Counter(level_of(device, pool) for device in fleet(tiers_of(entry), 100, 0, family))
        assert held == dict(zip((4, 3, 2, 1, 0), shares, strict=True))


def test_smallest_and_largest_are_the_ends_of_table_3_6() -> None:
    for small in ("", "-small"):
        found = rows(f"table3.2{small}")
        ends = [count_params(network(found[f"{row}-high"], "batch")) for row in BOUNDS]
        whole = network(found["fedrolex-high"], "batch")
        assert ends == [count_params(whole, prefix(whole.layout(), FIVE[0])), count_params(whole)]
        assert small or ends == [44_510, 11_172_170]
        for row in BOUNDS:
            assert widths(found[f"{row}-low"]) == (1.0,) and [t.share for t in tiers_of(found[f"{row}-low"])] == [1.0]

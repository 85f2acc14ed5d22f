"""The suites of FlexFL, against what its text, its tables and its code say (Chen et al., IEEE TCAD 2024)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fl_engine.algorithms import FlexFL, HeteroFL, ScaleFL
from fl_engine.core.costs import count_params
from fl_engine.selection import ResourceTable
from flexfleet.config import flatten, load_config
from flexfleet.config.comparison_runs import Entry
from flexfleet.config.resolve import algorithm
from flexfleet.experiments import published_suites
from flexfleet.pipeline.prepare import Resolved

LARGE = [
    name
    for name in published_suites.names()
    if name.startswith("flexfl/") and not name.endswith(published_suites.SMALL)
]


def runs(name: str, only: str | None = None) -> dict[str, Entry]:
    found = published_suites.entries_of(
        published_suites.load(f"flexfl/{name}"), only, "0", {}, partial(load_config, None), "id"
    )
    return {entry.label: entry for entry in found}


def values(name: str, path: str, only: str = "flexfl") -> list[Any]:
    return [flatten(entry.config)[path] for entry in runs(name, only).values()]


@pytest.mark.parametrize("name", LARGE)
def test_what_the_text_says_of_all(name: str) -> None:
    """Sec. IV: SGD with .01 and momentum .5, batches of 50, 5 epochs; Sec. IV-A3: Gamma 10 %, tau 3, lambda 10."""
    for label, entry in runs(name.removeprefix("flexfl/")).items():
        training = entry.config.training
        assert (training.lr, training.momentum, training.batch_size, training.epochs) == (0.01, 0.5, 50, 5)
        assert (training.weight_decay, training.lr_decay, training.drop_last) == (1e-4, 0.998, True)
        assert entry.config.partition.cap and entry.config.rounds.evaluate_every == 1
        assert entry.config.pretrain.reset_adam
        made = algorithm(entry.config)
        if isinstance(made, FlexFL) and name not in ("flexfl/table4", "flexfl/figure8", "flexfl/figure9"):
            assert (made.adaptive_size, made.temperature, made.rule, made.teachers) == (10, 3, "authors", "authors")
            assert made.kd_weight == (0 if label == "no-kd" else 10)
        if isinstance(made, HeteroFL):
            assert (made.scaler, made.mask_labels, made.static_bn) == (False, False, False)
        if isinstance(made, ScaleFL):
            assert made.kd_weight == 0
        if isinstance(made, FlexFL | HeteroFL | ScaleFL):
            assert isinstance(made.selection, ResourceTable)


def test_table_2() -> None:
    """Three networks, three data sets, three partitions, four methods; 100 devices, a tenth of them a round."""
    found = runs("table2")
    nets, data, parts = ("vgg16", "resnet34", "mobilenetv2"), ("cifar10", "cifar100", "tiny"), ("iid", "a0.6", "a0.3")
    methods = ("flexfl", "heterofl", "scalefl", "decoupled")
    assert set(found) == {f"{m}-{n}-{d}-{p}" for m in methods for n in nets for d in data for p in parts}
    for label, entry in found.items():
        method, net, of, part = label.split("-")
        config = entry.config
        assert (config.algorithm["name"], config.model["name"]) == (method, net)
        assert config.dataset.name == {"tiny": "tiny_imagenet"}.get(of, of)
        assert (config.partition.clients, config.training.fraction, config.rounds.stop) == (100, 0.1, 1000)
        rule = (config.partition.rule, None if part == "iid" else config.partition.alpha)
        assert rule == {"iid": ("iid", None), "a0.6": ("dirichlet", 0.6), "a0.3": ("dirichlet", 0.3)}[part]
        assert config.model.get("pool_after") == ([3, 5, 8, 11, 13] if net == "vgg16" else None)
    widths = {label: algorithm(found[f"scalefl-{label}-iid"].config) for label in ("vgg16-tiny", "resnet34-cifar100")}
    assert [getattr(made, "widths", None) for made in widths.values()] == [(0.75, 0.82, 1.0), (0.81, 0.95, 1.0)]
    uneven = algorithm(found["scalefl-mobilenetv2-cifar10-a0.3"].config)
    assert isinstance(uneven, ScaleFL) and uneven.widths == (0.75, 0.82, 1.0), (
        "of the commands for data that are not IID"
    )


@pytest.mark.parametrize(
    ("net", "sizes"),
    [
        ("vgg16", [29.36, 44.69, 53.80, 92.54, 100]),
        ("resnet34", [29.18, 44.90, 54.09, 93.00, 100]),
        ("mobilenetv2", [29.41, 43.84, 54.74, 93.71, 100]),
    ],
)
def test_the_pools_of_cifar10_are_those_of_the_code(net: str, sizes: list[float]) -> None:
    config = runs("table2", f"flexfl-{net}-cifar10-a0.3")[f"flexfl-{net}-cifar10-a0.3"].config
    made, family = algorithm(config), Resolved.of(config).network((3, 32, 32), 10)
    assert isinstance(made, FlexFL) and made.preparations == (), "nothing is pre-trained"
    pool = made.pool(family, {}, None)  # type: ignore[arg-type]  # which asks for no server
    assert [round(100 * count_params(family, m.spec) / count_params(family), 2) for m in pool] == sizes


def test_tables_3_to_7() -> None:
    assert values("table3", "partition.proxy") == [0.01, 0.05, 0.1, 0.2, 0.5, 1.0]
    assert values("table3", "partition.proxy_shared") == [True] * 6 and values("table3", "algorithm.apoz") == [None] * 6
    assert values("table4", "algorithm.adaptive_size") == [1, 2, 5, 10, 15]
    sigma = {
        label.split("-")[1]: sorted({s for tier in entry.config.fleet.tiers for s in tier.sigma})
        for label, entry in runs("table6", "scalefl").items()
    }
    assert sigma == {"conf1": [0], "conf2": [5, 8, 10], "conf3": [10, 20, 30]}, "Table V"
    found = runs("table7")
    assert len(found) == (3 + 2 * 3) * 4, "VGG16 takes no maps of 20 x 20"
    clients = {label.split("-")[2]: entry.config.partition.clients for label, entry in found.items()}
    assert clients == {"femnist": 180, "widar": 100}
    assert found["decoupled-resnet34-femnist"].config.partition.rule == "natural"

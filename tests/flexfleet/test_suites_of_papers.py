"""The suites of AdaptiveFL (Jia et al., DAC 2024), FedRolex (Alam 2023, chapter 3), FlexFL (Chen et al., IEEE TCAD
2024), FedX (Lai et al., DCOSS-IoT 2025) and multi-branch networks with Oort (Juan and Wu, Algorithms 2024) say what the
papers' texts, tables, figures and code say."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from fl_engine.algorithms import FedRolex, FedX, FlexFL, HeteroFL, MultiBranch, ScaleFL
from fl_engine.algorithms.fine_tuning import FineTuned, FineTuning
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import costs
from fl_engine.core.augmentation import Crop, Flip
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.widths import prefix
from fl_engine.fleet.devices import fleet
from fl_engine.models.chains import VGG16
from fl_engine.models.layers import Norm
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import PreResNet18, ResNet18
from fl_engine.selection import ResourceTable
from fl_engine.selection.capacity import level_of, round_size
from flexfleet.config import algorithm
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.experiments import published_suites
from flexfleet.pipeline.prepare import Resolved
from tests.flexfleet.test_suites import runs


@cache
def rows(name: str) -> dict[str, PlannedRun]:
    return {entry.label: entry for entry in runs(name, None, "0").values()}


def large(paper: str) -> list[str]:
    names = (name for name in published_suites.names() if name.startswith(f"{paper}/"))
    return [name for name in names if not name.endswith("-small")]


def tiers_of(entry: PlannedRun) -> tuple[Any, ...]:
    return tuple(entry.config.fleet.tiers)


@pytest.mark.parametrize("name", large("adaptivefl"))
def test_adaptivefl_has_the_settings_of_section_4(name: str) -> None:
    """SGD at .01 with momentum .5, batches of 50, 5 local epochs, a tenth of 100 clients; code: 1,000 rounds, the best
    is printed, weight decay 1e-4, the rate falls by .998 a round, the last batch is dropped."""
    for label, entry in rows(name).items():
        t, r = entry.config.training, entry.config.rounds
        assert (t.lr, t.momentum, t.batch_size, t.epochs) == (0.01, 0.5, 50, 5)
        assert (t.weight_decay, t.lr_decay, t.drop_last) == (1e-4, 0.998, True)
        assert (r.stop, r.evaluate_every) == (1000, 1)
        partition = entry.config.partition
        if name == "adaptivefl/figure6":
            assert partition.clients == 17 and round_size(t.fraction, partition.clients) == 10
        elif name == "adaptivefl/figure4":
            assert partition.clients == int(label.rpartition("k")[2]) and t.fraction == 0.1
        else:
            assert partition.clients == (180 if "femnist" in label else 100) and t.fraction == 0.1


def options(entry: PlannedRun) -> Any:
    return entry.config.algorithm


def test_adaptivefl_baselines_are_those_of_its_code() -> None:
    """HeteroFL at widths .5/.71/1 without its additions, ScaleFL without distillation, both weighted by samples, a size
    drawn first; All-Large asks every client."""
    found = rows("adaptivefl/table3")
    for case in ("433", "811", "181", "118"):
        hetero, scale = options(found[f"heterofl-{case}"]), options(found[f"scalefl-{case}"])
        assert list(hetero["widths"]) == [0.5, 0.71, 1.0]
        assert not (hetero["scaler"] or hetero["mask_labels"] or hetero["static_bn"])
        assert scale["kd_weight"] == 0 and hetero["weighting"] == scale["weighting"] == "examples"
        assert hetero["selection"]["name"] == scale["selection"]["name"] == "resource_table"
        assert options(found[f"all_large-{case}"])["eligible"] == "all"


@pytest.mark.parametrize(
    ("network", "widths"),
    [
        (VGG16((3, 32, 32), 10), (0.75, 0.82, 1.0)),
        (VGG16((3, 32, 32), 10, width=0.25), (0.75, 0.82, 1.0)),
        (ResNet18((3, 32, 32), 100), (0.75, 0.82, 1.0)),
        (MobileNetV2((22, 20, 20), 9), (0.87, 0.89, 1.0)),
    ],
)
def test_adaptivefl_devices_hold_their_level_and_no_larger_one(network: ModelFamily, widths: tuple[float, ...]) -> None:
    for method in (HeteroFL(static_bn=False), ScaleFL(widths=widths)):
        family = method.network(network) if isinstance(method, ScaleFL) else network
        pool = method.pool(family, None, None)  # type: ignore[arg-type]
        devices = fleet(tiers_of(rows("adaptivefl/figure6")["heterofl"]), 17, 0)
        held = {(device.tier, level_of(device, pool)) for device in devices}
        assert held == {("weak", 0), ("medium", 1), ("strong", 2)}
        assert all(device.sigma == 0 for device in devices), "what is sent is trained"


FIVE = (0.0625, 0.125, 0.25, 0.5, 1.0)
BOUNDS = ("smallest", "largest")


def widths(entry: PlannedRun) -> tuple[float, ...]:
    return tuple(entry.config.algorithm["widths"])


def network(entry: PlannedRun, norm: Norm = "static") -> PreResNet18:
    return PreResNet18((3, 32, 32), 10, width=entry.config.model.get("width", 1.0), norm=norm)


@pytest.mark.parametrize("name", [name for name in published_suites.names() if name.startswith("fedrolex/")])
def test_fedrolex_rows_train_on_equal_terms(name: str) -> None:
    """Static batch norm, the scaler, masked labels, one rate; weights alike, but for the rows that vary them."""
    found = rows(name)
    rates: dict[str, set[float]] = {}
    for entry in found.values():
        own, training = entry.config.algorithm, entry.config.training
        assert own["scaler"] and own["mask_labels"] and own["static_bn"]
        assert "table3.4" in name or own["weighting"] == "uniform"
        cheap = name in ("fedrolex/figure3.4-small", "fedrolex/rounds-small")
        assert entry.config.model["name"] == ("small_cnn" if cheap else "preresnet18")
        assert entry.config.partition.rule == "disjoint_labels"
        assert (training.momentum, training.weight_decay, training.epochs, training.lr_decay) == (0.9, 5e-4, 1, 1.0)
        assert training.clip_norm == 1.0 and training.augment == (Crop(padding=4), Flip())
        rates.setdefault(entry.config.dataset.name, set()).add(training.lr)
    assert all(len(each) == 1 for each in rates.values())


@pytest.mark.parametrize("name", large("fedrolex"))
def test_fedrolex_has_the_settings_of_tables_3_7_and_3_8(name: str) -> None:
    assert published_suites.load(name).seeds == (0, 1, 2, 3, 4), "five seeds (section 3.3)"
    for entry in rows(name).values():
        config = entry.config
        t, partition = config.training, config.partition
        ten = config.dataset.name == "cifar10"
        assert (t.batch_size, t.lr) == ((10, 2e-4) if ten else (24, 1e-4))
        assert partition.labels_per_client in ((2, 5) if ten else (20, 50)) and partition.clients == 100
        assert name == "fedrolex/table3.5" or round_size(t.fraction, 100) == 10


@pytest.mark.parametrize(("table", "shares"), [("table3.2", (20,) * 5), ("table3.3", (6, 10, 11, 18, 55))])
def test_fedrolex_asks_each_capacity_for_its_width(table: str, shares: tuple[int, ...]) -> None:
    """Fig. 3.7: 6, 10, 11, 18 and 55 of 100 clients hold 1, 1/2, 1/4, 1/8 and 1/16. The small twins' networks too."""
    for small in ("", "-small"):
        entry = rows(f"fedrolex/{table}{small}")["fedrolex-high"]
        assert widths(entry) == FIVE and widths(rows(f"fedrolex/{table}{small}")["heterofl-low"]) == FIVE
        family = network(entry)
        pool = FedRolex(widths=FIVE).pool(family, None, None)  # type: ignore[arg-type]
        held = Counter(level_of(device, pool) for device in fleet(tiers_of(entry), 100, 0, family))
        assert held == dict(zip((4, 3, 2, 1, 0), shares, strict=True))


def test_fedrolex_bounds_are_the_ends_of_table_3_6() -> None:
    for small in ("", "-small"):
        found = rows(f"fedrolex/table3.2{small}")
        ends = [count_params(network(found[f"{row}-high"], "batch")) for row in BOUNDS]
        whole = network(found["fedrolex-high"], "batch")
        assert ends == [count_params(whole, prefix(whole.layout(), FIVE[0])), count_params(whole)]
        assert small or ends == [44_510, 11_172_170]
        for row in BOUNDS:
            assert widths(found[f"{row}-low"]) == (1.0,) and [t.share for t in tiers_of(found[f"{row}-low"])] == [1.0]


@pytest.mark.parametrize("name", large("flexfl"))
def test_flexfl_has_the_settings_of_section_4(name: str) -> None:
    """Sec. IV: SGD with .01 and momentum .5, batches of 50, 5 epochs; Sec. IV-A3: Gamma 10 %, tau 3, lambda 10."""
    for label, entry in rows(name).items():
        training = entry.config.training
        assert (training.lr, training.momentum, training.batch_size, training.epochs) == (0.01, 0.5, 50, 5)
        assert (training.weight_decay, training.lr_decay, training.drop_last) == (1e-4, 0.998, True)
        assert entry.config.partition.cap and entry.config.rounds.evaluate_every == 1
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


@pytest.mark.parametrize(
    ("net", "sizes"),
    [
        ("vgg16", [29.36, 44.69, 53.80, 92.54, 100]),
        ("resnet34", [29.18, 44.90, 54.09, 93.00, 100]),
        ("mobilenetv2", [29.41, 43.84, 54.74, 93.71, 100]),
    ],
)
def test_flexfl_pools_of_cifar10_are_those_of_its_code(net: str, sizes: list[float]) -> None:
    config = rows("flexfl/table2")[f"flexfl-{net}-cifar10-a0.3"].config
    made, family = algorithm(config), Resolved.of(config).network((3, 32, 32), 10)
    assert isinstance(made, FlexFL) and made.preparations == (), "nothing is pre-trained"
    pool = made.pool(family, {}, None)  # type: ignore[arg-type]  # which asks for no server
    assert [round(100 * count_params(family, m.spec) / count_params(family), 2) for m in pool] == sizes


CLASSES = {"tiny_imagenet": range(150, 200), "uci_har": (4, 5), "cifar10": (8, 9), "femnist": range(46, 62)}
"""Classes that only the server has (section IV-B). UCI-HAR has one class more than HAR-Wild."""
DEVICES = {"tiny_imagenet": 100, "uci_har": 21, "cifar10": 100, "femnist": 1000}


@pytest.mark.parametrize("name", large("fedx"))
def test_fedx_has_the_settings_of_section_4(name: str) -> None:
    """SGD at .01 in batches of 32, gamma 1e-4, or 0 in the baselines; classes of server and devices are disjoint."""
    for entry in rows(name).values():
        config, t, made = entry.config, entry.config.training, algorithm(entry.config)
        assert (t.lr, t.batch_size, t.momentum, t.weight_decay, t.epochs) == (0.01, 32, 0.0, 0.0, 1)
        data = config.dataset.name
        assert (config.partition.rule, config.partition.clients) == ("iid", DEVICES[data])
        assert config.partition.server_classes == tuple(CLASSES[data])
        assert config.model["name"] == ("har_cnn" if data == "uci_har" else "mobilenetv3_ofa")
        if isinstance(made, FineTuned) and entry.label.partition("-")[0] not in ("not", "no"):
            gamma = 1e-4 if isinstance(made, FedX) else 0
            assert made.fine_tuning == FineTuning(epochs=1, batch_size=32, lr=0.01, gamma=gamma)


@pytest.mark.parametrize(
    ("case", "shape", "classes", "bits"), [("tiny", (3, 64, 64), 200, (11, 9)), ("har", (128, 9), 6, (10, 8))]
)
def test_fedx_devices_get_the_sub_networks_of_figure_5(
    case: str, shape: tuple[int, ...], classes: int, bits: tuple[int, int]
) -> None:
    config = rows("fedx/figure5")[f"medium-40-{case}"].config
    made, family = algorithm(config), Resolved.of(config).network(shape, classes)
    devices = fleet(tuple(config.fleet.tiers), 10, 0, family)
    pool = made.pool(family, {}, None)  # type: ignore[arg-type]
    made.check(devices, pool, None)  # type: ignore[arg-type]
    sent = Counter(pool[level_of(device, pool) or 0].name for device in devices)
    assert sent == {"small": 6, "medium": 4}
    assert [m.codecs.down for m in pool if m.codecs and m.dispatched] == [Qsgd(bits=each) for each in bits]


@pytest.mark.parametrize("name", large("multibranch"))
def test_multibranch_trains_as_in_oorts_code(name: str) -> None:
    """Sec. 5.1.1: 2,800 clients, 100 in each of 1,000 rounds. Code: 20 steps with batches of 30; the rate is .04, times
    .95 after every fifth round. Clients of CIFAR have 18 images on average, and LEAF's writers 204."""
    for label, entry in rows(name).items():
        config = entry.config
        training = algorithm(config).training
        selected = [round_size(training.fraction * more, 2800) for more in (1, config.rounds.over_provision)]
        assert (config.partition.clients, selected, config.rounds.stop) == (2800, [100, 130], 1000)
        sizes, steps = ((204,), 18) if config.dataset.name == "femnist" else ((5, 18, 59), 20)
        assert {costs.steps(training, n) for n in sizes} == {steps}
        for fives in (0, 1, 40, 200):
            assert training.optimizer_in(5 * fives).lr == pytest.approx(0.04 * 0.95**fives, rel=0.01)
        assert (algorithm(config).selection.name == "oort") == ("oort" in label)


@pytest.mark.parametrize(("small", "branches", "params"), [("", 10, 21_282_122), ("-small", 8, 176_402)])
def test_multibranch_networks_of_table_4(small: str, branches: int, params: int) -> None:
    """Sec. 5.1.2: nine branches and the end of ResNet34 (He et al.). Seven exits fit into ResNet18."""
    config = rows(f"multibranch/table4{small}")["mb_oort"].config
    made, family = algorithm(config), Resolved.of(config).network((3, 32, 32), 10)
    assert isinstance(made, MultiBranch)
    pool = made.pool(made.network(family), {}, None)  # type: ignore[arg-type]  # which asks for no server
    assert (len(pool), pool[-1].params) == (branches, params)

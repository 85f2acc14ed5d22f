"""`flexfleet.compare` from Python: the command line's folders and bits, labels, factors, and code of a cell."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.algorithms.fedavg import FedAvg
from flexfleet.api.arguments import entries_of
from flexfleet.config import flatten, load_config
from flexfleet.config.comparison_runs import crossed, factors_of
from flexfleet.config.dotted import parse_sets
from flexfleet.experiments import published_suites
from flexfleet.experiments.published_suites import PaperSuite
from tests.harness.from_python import OPTIONS, SMALL
from tests.harness.pictures import skip_pages
from tests.harness.settings import refused_at


@dataclass(frozen=True)
class Ours(FedAvg):
    boost: float = 1.0


@pytest.fixture(scope="module", autouse=True)
def store(module_folder: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        skip_pages(patch)
        yield module_folder / "runs"


@pytest.fixture(scope="module")
def both(store: Path) -> ff.Comparison:
    return ff.compare(["flexfl", "heterofl"], seeds=(0, 1), id="both", to=(0.05,), **SMALL)


def configs(algorithms: Any, over: Any = None, **common: Any) -> dict[str, dict[str, Any]]:
    """The flat configuration of each label, without running anything."""
    common["options"] = {**OPTIONS, **common.get("options", {})}
    found = entries_of(algorithms, (0,), over or {}, "unused", common)
    return {entry.label: flatten(entry.config) for entry in found}


# ---------------------------------------------------------------------------------------------- a comparison
@pytest.mark.long
def test_compare_in_processes_gives_the_same_bits_and_files(both: ff.Comparison) -> None:
    two = ff.compare(["heterofl"], seeds=[0], id="processes", jobs=2, **SMALL)
    assert two.runs["heterofl", 0].model_sha256 == both.runs["heterofl", 0].model_sha256
    assert len({both.runs[pair].model_sha256 for pair in both.runs}) == 4
    theirs = {str(path.relative_to(two.folder)) for path in two.folder.rglob("*")}
    mine = {str(path.relative_to(both.folder)) for path in both.folder.rglob("*")}
    of_flexfl = {name for name in mine if name.startswith("flexfl") or name == "shared-s0/pretrain/apoz.json"}
    assert {name for name in mine - of_flexfl if "-s1" not in name} == theirs


def test_the_table_has_the_figures_of_the_runs(both: ff.Comparison) -> None:
    assert (both.id, both.labels, both.seeds) == ("both", ("flexfl", "heterofl"), (0, 1))
    line = dict(zip(both.table.columns, both.table.iloc[0], strict=True))
    full = [both.runs["flexfl", seed].metrics["full"] for seed in (0, 1)]
    assert (line["label"], line["algorithm"], line["seeds"]) == ("flexfl", "flexfl", 2)
    assert line["full"] == pytest.approx(statistics.fmean(full))
    assert line["full_std"] == pytest.approx(statistics.stdev(full))
    assert line["seeds_to_0.05"] == 2
    assert both.report.is_file()
    assert "Test accuracy" in str(both) and "heterofl" in repr(both)


def test_paired_differences_are_those_of_the_runs(both: ff.Comparison) -> None:
    found = both.paired("flexfl", "heterofl")
    for metric in ("avg", "full"):
        scores = [[both.runs[label, seed].metrics[metric] for seed in (0, 1)] for label in both.labels]
        differences = tuple(a - b for a, b in zip(*scores, strict=True))
        assert both.paired("flexfl", "heterofl", metric).differences == differences
    assert found.pairs == 1
    assert both.paired("flexfl", "heterofl", "mb_up").mean != 0
    best = [[both.runs[label, seed].metrics["best"]["full"] for seed in (0, 1)] for label in both.labels]
    expected = tuple(a - b for a, b in zip(*best, strict=True))
    assert both.paired("flexfl", "heterofl", "best_full").differences == expected
    with pytest.raises(ff.ConfigError, match="did you mean 'full'"):
        both.paired("flexfl", "heterofl", "ful")


def test_load_comparison_takes_folder_and_id(both: ff.Comparison) -> None:
    for place in ("both", both.folder, str(both.folder), both):
        assert ff.load_comparison(place).runs.keys() == both.runs.keys()
    with pytest.raises(ff.ConfigError):
        ff.load_comparison("nowhere")
    with pytest.raises(ff.ConfigError, match=r"resume=True.* id"):
        ff.compare(["flexfl"], id="both", **SMALL)


def test_resumed_comparison_runs_missing_runs(both: ff.Comparison) -> None:
    before = both.runs["heterofl", 1].model_sha256
    shutil.rmtree(both.folder / "heterofl-s1")
    more = ff.compare(["flexfl", "heterofl"], seeds=(0, 1), id="both", to=iter((0.05,)), resume=True, **SMALL)
    assert more.runs["heterofl", 1].model_sha256 == before
    with refused_at("id"):
        ff.compare(["flexfl"], resume=True, **SMALL)


# ------------------------------------------------------------------------------------------------ arguments
def test_labels_come_from_names_classes_and_objects() -> None:
    found = configs(["fedrolex", FedAvg, Ours(boost=3.0)])
    assert list(found) == ["fedrolex", "fedavg", "Ours"]
    assert found["Ours"]["algorithm.name"] == f"{__name__}:Ours"
    assert found["Ours"]["algorithm.boost"] == 3.0


def test_label_has_its_own_settings() -> None:
    found = configs(
        {"plain": "flexfl", "no_kd": {"algorithm": "flexfl", "algorithm.kd_weight": 0, "learning_rate": 0.2},
         "wide": {"algorithm": Ours(boost=2.0), "model": "vgg16", "training.lr": 0.3}},
        learning_rate=0.1, model="small_cnn", options={"training.momentum": 0.5},
    )  # fmt: skip
    assert [each["training.lr"] for each in found.values()] == [0.1, 0.2, 0.3]
    assert [each["model.name"] for each in found.values()] == ["small_cnn", "small_cnn", "vgg16"]
    assert {each["training.momentum"] for each in found.values()} == {0.5}
    assert found["no_kd"]["algorithm.kd_weight"] == 0 and "algorithm.kd_weight" not in found["plain"]
    assert found["wide"]["algorithm.boost"] == 2.0


def test_name_in_a_label_drops_options_of_the_old_name() -> None:
    labels = {"old": {"codec.up.name": "qsgd"}, "new": {"codec": {"up": {"name": "identity"}}}}
    found = configs(
        {label: {"algorithm": "heterofl", **own} for label, own in labels.items()},
        options={"codec.up": {"name": "qsgd", "bits": 4}},
    )
    assert found["old"]["codec.up.bits"] == 4 and "codec.up.bits" not in found["new"]


@pytest.mark.parametrize(
    ("algorithms", "over", "common", "path"),
    [
        ("flexfl", None, {}, "algorithms"),
        ([], None, {}, "algorithms"),
        (["flexfl", "flexfl"], None, {}, "algorithms"),
        ({"../a": "flexfl"}, None, {}, "algorithms"),
        ([{"algorithm": "flexfl", "training.lr": 1}], None, {}, "algorithms"),
        ({"a": {"training.lr": 1}}, None, {}, "algorithms"),
        ({"a": {"algorithm": "flexfl", "seed": 3}}, None, {}, "seed"),
        ({"a": "flexfl", "b": {"algorithm": "flexfl", "rounds": 9}}, None, {}, "rounds.stop"),
        ({"a": {"algorithm": "flexfl", "training.lr": 0.1, "training": {"lr": 0.2}}}, None, {}, "training.lr"),
        (["flexfl"], None, {"algorithm": "flexfl"}, "algorithm.name"),
        (["flexfl"], None, {"callbacks": []}, "callbacks"),
        (["flexfl"], None, {"round": 3}, "round"),
        (["flexfl"], {"training.lr": 0.1}, {}, "training.lr"),
        (["flexfl"], {"training.lr": [0.1]}, {"learning_rate": 1}, "training.lr"),
        (["flexfl"], {"flexfl:training.lr": [0.1]}, {}, "flexfl:training.lr"),
        (["flexfl"], {"rounds.stop": [1, 2]}, {}, "rounds.stop"),
        (["flexfl"], {"training.lr": [0.1, 0.1]}, {}, "over"),
    ],
)
def test_wrong_arguments_are_named(algorithms: Any, over: Any, common: dict[str, Any], path: str) -> None:
    with refused_at(path):
        configs(algorithms, over, **common)


@pytest.mark.parametrize("wrong", [{"seeds": "0,1"}, {"seeds": (1, 1)}, {"jobs": 0}, {"to": (40,)}, {"id": "../a"}])
def test_compare_writes_nothing_for_wrong_arguments(wrong: dict[str, Any], store: Path) -> None:
    before = set(store.iterdir()) if store.exists() else set()
    with pytest.raises(ff.ConfigError):
        ff.compare(["flexfl"], **{"id": "wrong", **wrong}, **SMALL)
    assert (set(store.iterdir()) if store.exists() else set()) == before


# ---------------------------------------------------------------------------------------------------- factors
def test_factors_run_every_label_with_every_combination() -> None:
    found = configs(["flexfl", "heterofl"], {"learning_rate": [0.01, 0.1], "partition.rule": ["iid", "dirichlet"]})
    assert list(found) == [
        f"{label}-lr{lr}-rule{rule}"
        for label in ("flexfl", "heterofl") for lr in ("0.01", "0.1") for rule in ("iid", "dirichlet")
    ]  # fmt: skip
    one = found["heterofl-lr0.01-ruleiid"]
    assert (one["algorithm.name"], one["training.lr"], one["partition.rule"]) == ("heterofl", 0.01, "iid")


def test_factors_become_labels() -> None:
    assert factors_of(["training.lr=0.01, 1e-3", "model.stages=[1, 2],[3]", "a.b=null,true,x"]) == {
        "training.lr": [0.01, 0.001], "model.stages": [[1, 2], [3]], "a.b": [None, True, "x"]
    }  # fmt: skip
    assert list(crossed(["a"], {"x.lr": [1e-05, -2, 3e20]})) == ["a-lr1e-05", "a-lr-2", "a-lr3e20"]
    assert list(crossed(["a"], {"m.s": [[1, 2], "p.q:Name", None, False]})) == [
        "a-s1-2", "a-sName", "a-snull", "a-sfalse"
    ]  # fmt: skip
    assert crossed(["a", "b"], {}) == {"a": ("a", {}), "b": ("b", {})}
    for wrong in ("training.lr", "=1", "training.lr=", "training.lr=[1"):
        with refused_at("over"):
            factors_of([wrong])


def test_factor_replaces_a_suites_setting() -> None:
    rows: Any = {"a": {"algorithm": "heterofl"}, "b": {"algorithm": "heterofl", "training.lr": 0.5}}
    suite = PaperSuite(seeds=(3,), settings={"training.lr": 0.9, "training.momentum": 0.1}, rows=rows)
    section = suite.model_copy(update={"settings": {"training": {"lr": 0.9, "momentum": 0.1}}})
    for each in (suite, section):
        found, _ = published_suites.entries_of(
            each, None, None, {}, partial(load_config, None), "unused", {"training.lr": [0.1, 0.2]}
        )
        rates = {entry.label: (entry.config.training.lr, entry.config.training.momentum) for entry in found}
        assert rates == {f"{label}-lr{lr}": (lr, 0.1) for label in "ab" for lr in (0.1, 0.2)}
    for given in ("training.lr=1", "training={lr: 1}", "a:training={lr: 1}"):
        with pytest.raises(ff.ConfigError):
            published_suites.entries_of(
                suite, "a", None, parse_sets([given]), partial(load_config, None), "unused", {"training.lr": [0.1]}
            )

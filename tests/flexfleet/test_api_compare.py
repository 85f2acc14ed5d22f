"""`flexfleet.compare` from Python: the command line's folders and bits, labels, factors, and code of a cell."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.data import heat_map
from flexfleet.api.comparison_arguments import entries_of
from flexfleet.config import flatten, load_config
from flexfleet.config.comparison_runs import crossed, factors_of
from flexfleet.config.overrides import parse_sets
from flexfleet.experiments import published_suites
from flexfleet.experiments.published_suites import PaperSuite
from flexfleet.pipeline import run as run_module
from tests.harness.from_python import OPTIONS, SMALL


@dataclass(frozen=True)
class Ours(FedAvg):
    boost: float = 1.0


def page_stub(runs: Any, out: Path) -> Path:
    out.write_text("<html></html>")
    return out


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    here = tmp_path_factory.mktemp("comparisons")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(run_module, "report", page_stub)  # drawings have tests of their own
        patch.setattr(heat_map, "draw", lambda *_: None)
        yield here / "runs"


@pytest.fixture(scope="module")
def both(store: Path) -> ff.Comparison:
    return ff.compare(["flexfl", "heterofl"], seeds=(0, 1), id="both", to=(0.05,), **SMALL)


def asked(algorithms: Any, over: Any = None, **common: Any) -> dict[str, dict[str, Any]]:
    """The flat configuration of each label, without running anything."""
    common["options"] = {**OPTIONS, **common.get("options", {})}
    found = entries_of(algorithms, (0,), over or {}, "asked", common)
    return {entry.label: flatten(entry.config) for entry in found}


# ---------------------------------------------------------------------------------------------- a comparison
@pytest.mark.long
def test_compare_in_processes_gives_the_same_bits_and_files(both: ff.Comparison) -> None:
    two = ff.compare(["heterofl"], seeds=[0], id="processes", jobs=2, **SMALL)
    assert two.runs["heterofl", 0].model_sha256 == both.runs["heterofl", 0].model_sha256
    assert len({both.runs[pair].model_sha256 for pair in both.runs}) == 4
    theirs = {str(path.relative_to(two.folder)) for path in two.folder.rglob("*")}
    mine = {str(path.relative_to(both.folder)) for path in both.folder.rglob("*")}
    drawn = {name for name in theirs if name.endswith("partition.svg")}  # not in this process: see above
    of_flexfl = {name for name in mine if name.startswith("flexfl") or name == "shared-s0/pretrain/apoz.json"}
    assert {name for name in mine - of_flexfl if "-s1" not in name} == theirs - drawn


def test_the_table_has_the_figures_of_the_runs(both: ff.Comparison) -> None:
    assert (both.id, both.labels, both.seeds) == ("both", ("flexfl", "heterofl"), (0, 1))
    line = dict(zip(both.table.columns, both.table.iloc[0], strict=True))
    full = [both.runs["flexfl", seed].metrics["full"] for seed in (0, 1)]
    assert (line["label"], line["algorithm"], line["seeds"]) == ("flexfl", "flexfl", 2)
    assert line["full"] == pytest.approx(statistics.fmean(full))
    assert line["full_std"] == pytest.approx(statistics.stdev(full))
    assert line["seeds_to_0.05"] == 2
    assert both.report.is_file() and "comparison.html" in both._repr_html_() and "flexfl" in both._repr_html_()
    assert "Test accuracy" in str(both) and "heterofl" in repr(both)


def test_paired_differences_are_those_of_the_runs(both: ff.Comparison) -> None:
    found = both.paired("flexfl", "heterofl")
    for metric in ("avg", "full"):
        scores = [[both.runs[label, seed].metrics[metric] for seed in (0, 1)] for label in both.labels]
        differences = tuple(a - b for a, b in zip(*scores, strict=True))
        assert both.paired("flexfl", "heterofl", metric).differences == differences
    assert found.pairs == 1 and "below 0.5: 6 seeds" in str(found)
    assert both.paired("flexfl", "heterofl", "mb_up").mean != 0
    best = [[both.runs[label, seed].metrics["best"]["full"] for seed in (0, 1)] for label in both.labels]
    expected = tuple(a - b for a, b in zip(*best, strict=True))
    assert both.paired("flexfl", "heterofl", "best_full").differences == expected
    with pytest.raises(ff.ConfigError, match=r"no metric 'ful' \(did you mean 'full'\?\)"):
        both.paired("flexfl", "heterofl", "ful")


def test_a_comparison_is_found_again(both: ff.Comparison) -> None:
    for place in ("both", both.folder, str(both.folder), both):
        assert ff.load_comparison(place).runs.keys() == both.runs.keys()
    with pytest.raises(ff.ConfigError, match="there is no folder nowhere, nor runs/nowhere"):
        ff.load_comparison("nowhere")
    with pytest.raises(ff.ConfigError, match="exists already: go on with resume=True, or choose another id"):
        ff.compare(["flexfl"], id="both", **SMALL)


def test_resume_makes_what_is_missing(both: ff.Comparison) -> None:
    before = both.runs["heterofl", 1].model_sha256
    shutil.rmtree(both.folder / "heterofl-s1")
    more = ff.compare(["flexfl", "heterofl"], seeds=(0, 1), id="both", to=iter((0.05,)), resume=True, **SMALL)
    assert more.runs["heterofl", 1].model_sha256 == before
    with pytest.raises(ff.ConfigError, match="resume=True needs id"):
        ff.compare(["flexfl"], resume=True, **SMALL)


# ------------------------------------------------------------------------------------------------ what is asked
def test_labels_come_from_names_classes_and_objects() -> None:
    found = asked(["fedrolex", FedAvg, Ours(boost=3.0)])
    assert list(found) == ["fedrolex", "fedavg", "Ours"]
    assert found["Ours"]["algorithm.name"] == f"{__name__}:Ours"
    assert found["Ours"]["algorithm.boost"] == 3.0


def test_a_label_may_differ_in_its_own_settings() -> None:
    found = asked(
        {"plain": "flexfl", "no_kd": {"algorithm": "flexfl", "algorithm.kd_weight": 0, "learning_rate": 0.2},
         "wide": {"algorithm": Ours(boost=2.0), "model": "vgg16", "training.lr": 0.3}},
        learning_rate=0.1, model="small_cnn", options={"training.momentum": 0.5},
    )  # fmt: skip
    assert [each["training.lr"] for each in found.values()] == [0.1, 0.2, 0.3]
    assert [each["model.name"] for each in found.values()] == ["small_cnn", "small_cnn", "vgg16"]
    assert {each["training.momentum"] for each in found.values()} == {0.5}
    assert found["no_kd"]["algorithm.kd_weight"] == 0 and "algorithm.kd_weight" not in found["plain"]
    assert found["wide"]["algorithm.boost"] == 2.0


COMMON: dict[str, dict[str, Any]] = {
    "a keyword": {"learning_rate": 0.2},
    "an option": {"options": {"training.lr": 0.2, "training.momentum": 0.25}},
    "a section": {"options": {"training": {"lr": 0.2, "momentum": 0.25}}},
}


@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize(
    "own",
    [{"learning_rate": 0.1}, {"training.lr": 0.1}, {"training": {"lr": 0.1}}],
    ids=["keyword", "option", "section"],
)
def test_setting_of_a_label_replaces_that_of_all_runs(common: str, own: dict[str, Any]) -> None:
    found = asked({"a": "flexfl", "b": {"algorithm": "flexfl", **own}}, **COMMON[common])
    assert [found[label]["training.lr"] for label in "ab"] == [0.2, 0.1]
    assert len({found[label]["training.momentum"] for label in "ab"}) == 1
    assert ("options" in COMMON[common]) == (found["b"]["training.momentum"] == 0.25)


YOGI, QSGD = {"name": "yogi", "lr": 0.03}, {"name": "qsgd", "bits": 4}


@pytest.mark.parametrize(
    ("common", "own"),
    [
        ({"algorithm.server": YOGI}, {"algorithm.server.name": ...}),
        ({"codec": {"up": QSGD}}, {"codec.up.name": ...}),
        ({"codec.up": QSGD}, {"codec": {"up": {"name": ...}}}),
    ],
)
def test_a_labels_name_drops_the_options_of_another(common: dict[str, Any], own: dict[str, Any]) -> None:
    def named(value: Any, name: str) -> Any:
        return name if value is ... else {key: named(each, name) for key, each in value.items()}

    of_server = "algorithm.server" in common
    path, option = ("algorithm.server", "lr") if of_server else ("codec.up", "bits")
    old, new = ("yogi", "adam") if of_server else ("qsgd", "identity")
    labels = {name: {"algorithm": "heterofl", **named(own, name)} for name in (old, new)}
    found = asked({"all": "heterofl", **labels}, options=common)
    assert [found[label][f"{path}.name"] for label in found] == [old, old, new]
    assert found["all"][f"{path}.{option}"] == found[old][f"{path}.{option}"] and f"{path}.{option}" not in found[new]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a factor by two names": (
        lambda: asked(["flexfl"], {"training.lr": [0.1], "learning_rate": [0.2]}), r"training\.lr is given twice"
    ),
    "a setting and its section": (
        lambda: asked({"a": {"algorithm": "flexfl", "training.lr": 0.1, "training": {"lr": 0.2}}}),
        r"training\.lr is given twice",
    ),
    "one name": (lambda: asked("flexfl"), "a list, or a mapping by label"),
    "none": (lambda: asked([]), "at least one"),
    "twice": (lambda: asked(["flexfl", "flexfl"]), "flexfl is given twice"),
    "a label that is no name": (lambda: asked({"../a": "flexfl"}), "cannot be a label"),
    "a label that is taken": (lambda: asked({"shared": "flexfl"}), "cannot be a label"),
    "settings without a label": (lambda: asked([{"algorithm": "flexfl"}]), "settings need a label"),
    "settings without an algorithm": (lambda: asked({"a": {"training.lr": 1}}), "a must name one algorithm"),
    "an option of another": (lambda: asked(["all_large"], options={"algorithm.kd_weight": 0}), "all_large: .*kd_w"),
    "a seed of a label": (lambda: asked({"a": {"algorithm": "flexfl", "seed": 3}}), "seeds are a list"),
    "rounds of a label": (lambda: asked({"a": "flexfl", "b": {"algorithm": "flexfl", "rounds": 9}}), "rounds.stop"),
    "an algorithm beside": (lambda: asked(["flexfl"], algorithm="flexfl"), "first argument"),
    "callbacks": (lambda: asked(["flexfl"], callbacks=[]), "flexfleet.run"),
    "an unknown keyword": (lambda: asked(["flexfl"], round=3), "'round'"),
    "a factor as a number": (lambda: asked(["flexfl"], {"training.lr": 0.1}), "a list of values"),
    "a factor that is set too": (lambda: asked(["flexfl"], {"training.lr": [0.1]}, learning_rate=1), "leave one of"),
    "a factor of a label": (lambda: asked(["flexfl"], {"flexfl:training.lr": [0.1]}), "one of all labels"),
    "a factor of all runs": (lambda: asked(["flexfl"], {"rounds.stop": [1, 2]}), "rounds.stop"),
    "a factor twice alike": (lambda: asked(["flexfl"], {"training.lr": [0.1, 0.1]}), "both be called flexfl-lr0.1"),
    "seeds that are none": (lambda: ff.compare(["flexfl"], seeds="0,1"), "a list of whole numbers"),
    "no jobs": (lambda: ff.compare(["flexfl"], jobs=0), "at least 1"),
    "an empty id": (lambda: ff.compare(["flexfl"], id="", resume=True, **SMALL), "a comparison's id is a plain name"),
    "accuracies": (lambda: ff.compare(["flexfl"], to=(40,), id="to", **SMALL), "shares above 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_is_written(what: str, store: Path) -> None:
    call, said = BAD[what]
    with pytest.raises(ff.ConfigError, match=said):
        call()
    assert not (store / "asked").exists() and not (store / "to").exists()


# ---------------------------------------------------------------------------------------------------- factors
def test_every_label_with_every_combination() -> None:
    found = asked(["flexfl", "heterofl"], {"learning_rate": [0.01, 0.1], "partition.rule": ["iid", "dirichlet"]})
    assert list(found) == [
        f"{label}-lr{lr}-rule{rule}"
        for label in ("flexfl", "heterofl") for lr in ("0.01", "0.1") for rule in ("iid", "dirichlet")
    ]  # fmt: skip
    one = found["heterofl-lr0.01-ruleiid"]
    assert (one["algorithm.name"], one["training.lr"], one["partition.rule"]) == ("heterofl", 0.01, "iid")


def test_the_labels_of_factors() -> None:
    assert factors_of(["training.lr=0.01, 1e-3", "model.stages=[1, 2],[3]", "a.b=null,true,x"]) == {
        "training.lr": [0.01, 0.001], "model.stages": [[1, 2], [3]], "a.b": [None, True, "x"]
    }  # fmt: skip
    assert list(crossed(["a"], {"x.lr": [1e-05, -2, 3e20]})) == ["a-lr1e-05", "a-lr-2", "a-lr3e20"]
    assert list(crossed(["a"], {"m.s": [[1, 2], "p.q:Name", None, False]})) == [
        "a-s1-2", "a-sName", "a-snull", "a-sfalse"
    ]  # fmt: skip
    both = crossed(["a"], {"codec.up.name": ["x"], "codec.down.name": ["y"]})
    assert both == {"a-up.namex-down.namey": ("a", {"codec.up.name": "x", "codec.down.name": "y"})}
    assert crossed(["a", "b"], {}) == {"a": ("a", {}), "b": ("b", {})}
    for wrong in ("training.lr", "=1", "training.lr=", "training.lr=[1"):
        with pytest.raises(ff.ConfigError, match="--over"):
            factors_of([wrong])


def test_a_factor_takes_the_place_of_what_a_suite_says() -> None:
    rows: Any = {"a": {"algorithm": "heterofl"}, "b": {"algorithm": "heterofl", "training.lr": 0.5}}
    suite = PaperSuite(seeds=(3,), settings={"training.lr": 0.9, "training.momentum": 0.1}, rows=rows)
    section = suite.model_copy(update={"settings": {"training": {"lr": 0.9, "momentum": 0.1}}})
    for each in (suite, section):
        found = published_suites.entries_of(
            each, None, None, {}, partial(load_config, None), "asked", {"training.lr": [0.1, 0.2]}
        )
        rates = {entry.label: (entry.config.training.lr, entry.config.training.momentum) for entry in found}
        assert rates == {f"{label}-lr{lr}": (lr, 0.1) for label in "ab" for lr in (0.1, 0.2)}
    for given in ("training.lr=1", "training={lr: 1}", "a:training={lr: 1}"):
        with pytest.raises(ff.ConfigError, match=r"training\.lr"):
            published_suites.entries_of(
                suite, "a", None, parse_sets([given]), partial(load_config, None), "asked", {"training.lr": [0.1]}
            )


def test_data_of_ones_own_are_compared(store: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    x, y = rng.random((120, 1, 8, 8), dtype=np.float32), rng.integers(0, 3, 120)
    own = ff.from_arrays(x, y)
    small = {**SMALL, "options": {"tracking.mlflow": None, "pretrain.epochs": 1, "partition.minimum": 1}}
    found = ff.compare(["all_large"], dataset=own, seeds=(0,), id="own", **small)
    assert found.runs["all_large", 0].config["dataset"]["name"].startswith("sha256:")

"""`flexfleet compare --suite`: the rows of published tables, from files that say where they differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.config import flatten, load_config
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.config.dotted import parse_sets
from flexfleet.experiments import published_suites
from flexfleet.experiments.comparison_file import ComparisonFile
from flexfleet.files.artifacts import RunResult
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from flexfleet.reports.page import NONE

Write = Callable[[str, str], str]

FEDAIOT = [name for name in published_suites.names() if name.startswith("fedaiot/")]
BASE = """
seeds: [0, 1]
settings: {rounds.stop: 3, training.lr: 0.1}
rows:
  large: {algorithm: all_large, algorithm.eligible: all}
  flex: {algorithm: flexfl, training.lr: 0.2}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(name: str, text: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return str(path)

    return file


def runs(name: str, only: str | None = None, seeds: str | None = None, *sets: str) -> dict[str, PlannedRun]:
    found, _ = published_suites.entries_of(
        published_suites.load(name), only, seeds, parse_sets(sets), partial(load_config, None), "id"
    )
    return {entry.name: entry for entry in found}


@cache
def all_runs(name: str) -> dict[str, PlannedRun]:
    return runs(name, None, "7")


def setting(entry: PlannedRun, path: str) -> Any:
    return flatten(entry.config)[path]


# ---------------------------------------------------------------------------------------------- those that come
@pytest.mark.parametrize("name", published_suites.names())
def test_every_row_is_a_configuration(name: str) -> None:
    suite, found = published_suites.load(name), all_runs(name)
    assert {entry.label for entry in found.values()} == set(suite.made()) and len(found) > 1
    assert {entry.seed for entry in found.values()} == {7} and suite.seeds


SERVER_RATES = {"visdrone": 0.1, "aep": 0.1}
"""Section 2.3.1: the server's learning rate in FedOPT; .01 for the others."""
PLAIN: dict[str, Any] = {
    "algorithm.name": "all_large", "partition.alpha": 0.1, "training.fraction": 0.1, "noise.labels": 0.0,
    "run.precision": "fp32",
}  # fmt: skip
FEDAIOT_ROWS: dict[str, dict[str, Any]] = {
    "fedavg-low": {"partition.alpha": 0.5},
    "fedopt-low": {"partition.alpha": 0.5, "algorithm.name": "fedopt"},
    "fedavg-high": {},
    "fedopt-high": {"algorithm.name": "fedopt"},
    "fedavg-30": {"training.fraction": 0.3},
    "noise-10": {"noise.labels": 0.1},
    "noise-30": {"noise.labels": 0.3},
    "fp16": {"run.precision": "fp16"},
}
"""Where each row of Tables 2.3 to 2.6 differs from FedAvg with 10 % of the clients and alpha = 0.1."""
CODE: dict[str, Any] = {
    "training.epochs": 1, "training.momentum": 0.0, "training.weight_decay": 0.0005, "training.lr_decay": 1.0,
    "training.drop_last": False, "training.sampler.name": "balanced", "training.sampler.smoothing": 1.0,
    "partition.minimum": 20, "algorithm.eligible": "all", "rounds.norm_bound": None, "noise.sure": 0.95,
}  # fmt: skip
"""Where the text is silent: SGD without momentum, samples weighted by 1 / (1 + their label's count), at least 20 a
client; classes whose row of Q has a maximum of .95 keep their labels."""
TORCH_ADAM = {"name": "adam", "b1": 0.9, "b2": 0.999, "tau": 1e-8, "bias_correction": True}


@pytest.mark.parametrize("name", FEDAIOT)
def test_every_row_of_fedaiot_is_that_of_its_table(name: str) -> None:
    source = name.removeprefix("fedaiot/").partition("-")[0]
    rows = {
        label: row for label, row in FEDAIOT_ROWS.items() if source not in ("aep", "visdrone") or "noise" not in label
    }
    found = {entry.label: entry for entry in all_runs(name).values()}
    assert found.keys() == rows.keys(), "numbers and images have no wrong labels"
    for label, row in rows.items():
        batch_size = 12 if source == "visdrone" else 32
        expected = {**PLAIN, **CODE, **row, "training.batch_size": batch_size}
        flat = flatten(found[label].config)
        assert {path: flat[path] for path in expected} == expected, label
        if label.startswith("fedopt"):
            server = {"lr": SERVER_RATES.get(source, 0.01), **TORCH_ADAM}
            assert {key: flat[f"algorithm.server.{key}"] for key in server} == server, label


# ------------------------------------------------------------------------------------------------------- files
def test_suite_overrides_the_suite_it_is_like(write: Write) -> None:
    base = write("base", BASE)
    name = write("own", f"like: {base}\nsettings: {{rounds.stop: 5}}\nrows: {{flex: {{training.epochs: 2}}}}\n")
    found = runs(name)
    assert list(found) == ["large-s0", "flex-s0", "large-s1", "flex-s1"]
    assert [setting(found[run], "rounds.stop") for run in found] == [5] * 4
    assert [setting(found[run], "training.lr") for run in ("large-s0", "flex-s0")] == [0.1, 0.2]
    assert [setting(found[run], "training.epochs") for run in ("large-s0", "flex-s0")] == [5, 2]
    assert list(runs(write("less", f"like: {base}\nrows: {{flex: null}}\n"))) == ["large-s0", "large-s1"]


def test_later_suites_of_like_win(write: Write) -> None:
    base = write("base", f"paper: One\nshows: it\ncost: an hour\nto: [0.5]\n{BASE}")
    small = write("small", "seeds: [0]\nsettings: {rounds.stop: 2}\nrows: {large: {training.epochs: 1}}\n")
    name = write("own", f"like: [{base}, {small}]\nlacks: the rest\n")
    found, suite = runs(name), published_suites.load(name)
    assert list(found) == ["large-s0", "flex-s0"]
    assert [setting(found[run], "rounds.stop") for run in ("large-s0", "flex-s0")] == [2, 2]
    assert [setting(found[run], "training.epochs") for run in ("large-s0", "flex-s0")] == [1, 5]
    assert (suite.paper, suite.shows, suite.cost, suite.lacks, suite.to) == ("One", "", "", "the rest", (0.5,))


CASES = """
cases:
  iid: {partition.rule: iid, training.lr: 0.3}
  a0.3: {partition.alpha: 0.3, flex:training.lr: 0.4}
"""


def test_each_row_is_run_in_each_case(write: Write) -> None:
    found = runs(write("cases", BASE + CASES), None, "0")
    assert list(found) == ["large-iid-s0", "large-a0.3-s0", "flex-iid-s0", "flex-a0.3-s0"]
    assert [setting(found[run], "training.lr") for run in found] == [0.3, 0.1, 0.2, 0.4], "suite, case, row, case's row"
    assert [setting(found[run], "partition.rule") for run in found] == ["iid", "dirichlet"] * 2
    base = write("base", BASE + CASES)
    less = write(
        "less", f"like: {base}\ncases: {{iid: null, few: {{partition.clients: 5}}, a0.3: {{training.lr: 0.5}}}}"
    )
    found = runs(less, "large", "0")
    assert {run: setting(found[run], "training.lr") for run in found} == {"large-few-s0": 0.1, "large-a0.3-s0": 0.5}


def test_rows_and_cases_are_chosen_by_name(write: Write) -> None:
    name = write("cases", BASE + CASES)
    assert list(runs(name, "flex", "0")) == ["flex-iid-s0", "flex-a0.3-s0"]
    assert list(runs(name, "a0.3", "0")) == ["large-a0.3-s0", "flex-a0.3-s0"]
    found = runs(name, "flex,large-iid", "0", "iid:training.lr=0.7", "flex-a0.3:training.lr=0.8", "training.lr=0.9")
    assert {run: setting(found[run], "training.lr") for run in found} == {
        "flex-iid-s0": 0.7,
        "flex-a0.3-s0": 0.8,
        "large-iid-s0": 0.7,
    }
    with pytest.raises(ConfigError, match=r"'aid'.*'iid'"):
        runs(name, "aid")
    with pytest.raises(ConfigError, match="'large'"):
        runs(name, "flex", "0", "large:training.lr=1.0")
    with pytest.raises(ConfigError, match=r"flax:training\.lr"):
        runs(write("odd", BASE + "cases: {iid: {flax:training.lr: 0.1}}"))
    with pytest.raises(ConfigError, match="must be unique"):
        runs(write("odd", BASE + "cases: {flex: {partition.rule: iid}}"))


def test_suite_of_the_guide_is_valid(write: Write) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/suites.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    found = runs(write("mine", text))
    labels = [f"{row}-{case}" for row in ("flexfl", "heterofl", "no-kd") for case in ("iid", "a0.3")]
    assert Counter(entry.label for entry in found.values()) == dict.fromkeys(labels, 2)
    for entry in found.values():
        if entry.seed == 0:
            check(Resolved.of(entry.config))


@pytest.mark.long
@pytest.mark.usefixtures("warm_starts")
def test_suite_with_a_central_reference(
    flexfleet: Any, write: Write, tmp_path: Path, quick: tuple[str, ...], own_folder: None
) -> None:
    (tmp_path / "params.yaml").write_text("training: {lr: -1}")  # published rows are not on top of one's own parameters
    name = write("mine", BASE.replace("0, 1]", "0, 1]\ncentral: true").replace("stop: 3", "stop: 1"))
    sets = [*(each for each in quick if "algorithm" not in each), "rounds.stop=1", "central.epochs=2"]
    argv = ("compare", "--suite", name, "--algorithms", "large,central", "--id", "one", "--jobs", "2", "--json")
    done = flexfleet(*argv, sets=sets).ok()
    found = ComparisonFile.model_validate(done.json)
    assert found.labels == ("large",) and found.seeds == (0, 1) and found.central is not None
    last = [RunResult.read(Path(f"runs/one/central-s{seed}/result.json")).metrics["full"] for seed in (0, 1)]
    assert found.central.settings["central.epochs"] == 2 and found.central.full.mean == pytest.approx(sum(last) / 2)
    table = Path("runs/one/comparison.md").read_text()
    assert f"| central training | {NONE} | {100 * sum(last) / 2:.2f} ± " in table
    assert ">central training<" in Path("runs/one/comparison.svg").read_text()
    assert flexfleet(*argv, "--resume", sets=sets).json == done.json

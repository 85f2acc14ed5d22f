"""What `flexfleet.run` and its like may be asked for from Python, and what is said of anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexfleet as ff
from fl_engine.algorithms.fedavg import FedAvg
from flexfleet.api.arguments import Arguments, name_of
from flexfleet.config import Config
from flexfleet.config.comparison_runs import factors_of


@dataclass(frozen=True)
class Ours(FedAvg):
    boost: float = 1.0


def config_of(config: Any = None, options: Any = None, keywords: Any = None) -> Config:
    arguments = Arguments(config, options, keywords or {})
    return arguments.load(arguments.overrides)[0]


def test_keywords_override_options_and_options_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("rounds: {stop: 7}\ntraining: {lr: 0.5}\nalgorithm: {name: heterofl}\nseed: 3\n")
    found = config_of(file, {"training.lr": 0.25}, {"rounds": 9, "algorithm": None, "seed": None})
    assert (found.rounds.stop, found.training.lr, found.algorithm["name"], found.seed) == (9, 0.25, "heterofl", 3)
    assert config_of({"rounds": {"stop": 4}}, None, {}).rounds.stop == 4
    assert (
        config_of(None, {"training.lr": np.float32(0.5), "partition.clients": np.int64(7)}, {}).partition.clients == 7
    )


def test_options_of_what_a_keyword_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = config_of(None, {"algorithm.mu": 5.0}, {"algorithm": "fedprox"})
    assert found.algorithm == {"name": "fedprox", "mu": 5.0}
    found = config_of(None, {"algorithm": {"on_too_small": "fail"}}, {"algorithm": "heterofl"})
    assert found.algorithm == {"name": "heterofl", "on_too_small": "fail"}
    found = config_of(None, {"model.norm": "bn"}, {"model": "small_cnn", "algorithm": FedAvg})
    assert found.model == {"name": "small_cnn", "norm": "bn"} and found.algorithm == {"name": "fedavg"}
    with pytest.raises(ff.ConfigError, match="width"):
        config_of(None, {"algorithm.widths": [0.5, 1.0]}, {"algorithm": "fedprox"})
    data = ff.from_arrays(np.zeros((8, 4), dtype=np.float32), np.arange(8) % 2)
    found = config_of(None, None, {"dataset": data, "store_uri": "s3://bucket/prefix"})
    assert (found.run.store, found.run.remote) == ("runs", "s3://bucket/prefix")
    assert found.dataset.root == str(tmp_path / "runs" / ".data") and sorted(Path().iterdir()) == [Path("runs")]
    found = config_of(None, {"run": {"store": "kept"}}, {"dataset": data})
    assert found.dataset.root == str(tmp_path / "kept" / ".data")


def test_data_with_owners_stay_with_their_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = np.arange(96, dtype=np.float32).reshape(48, 2), np.arange(48) % 2
    owned, nobodys = ff.from_arrays(x, y, clients=np.arange(48) % 3), ff.from_arrays(x, y)
    file = tmp_path / "p.yaml"
    file.write_text("partition: {minimum: 4}\nseed: 3\n")

    def partition(config: Any = None, options: Any = None, **keywords: Any) -> tuple[str, int, int]:
        found = config_of(config, options, {"dataset": owned, **keywords}).partition
        return found.rule, found.clients, found.minimum

    assert partition() == partition(Config()) == partition({"seed": 1}) == ("natural", 3, 1)
    assert partition(file, clients=2) == ("natural", 2, 4)
    assert partition(dataset=nobodys) == ("dirichlet", 20, 20)
    assert partition(partition_rule="iid") == partition({"partition": {"rule": "iid"}}) == ("iid", 3, 20)
    assert partition(options={"partition": {"rule": "dirichlet"}, "partition.clients": 5}) == ("dirichlet", 5, 20)
    assert partition(config_of(None, None, {"clients": 7})) == ("dirichlet", 7, 20), "a whole configuration"
    with pytest.raises(ff.ConfigError, match=r"^partition\.alpha"):
        partition(dirichlet_alpha=0.1)


@pytest.mark.parametrize(
    ("options", "keywords", "said"),
    [
        ({"algorithm.mu": 3.0}, {"algorithm": {"name": "fedprox", "mu": 2.0}}, r"algorithm\.mu is given twice"),
        ({"rounds": {"stop": 3}, "rounds.stop": 4}, {}, r"rounds\.stop is given twice"),
        ({"fleet": {"trace": None}, "fleet.trace": {"name": "lognormal"}}, {}, r"fleet\.trace is given twice"),
        ({"rounds": {"stop": 4}}, {"rounds": 3}, r"rounds\.stop is given twice, by rounds= and by options"),
        ({"rounds.stopp": 4}, {}, "stopp"),
        ({3: 4}, {}, "dotted names are expected"),
        ({"training.lr": object()}, {}, "a number, a text, a list or a mapping"),
        (None, {"dataset": (np.zeros((4, 2)), np.zeros(4))}, r"flexfleet.from_arrays\(x, y\)"),
        (None, {"dataset": 3}, "a name or data are expected, got int"),
        ({"rounds": 3}, {}, r"rounds is a section, got 3: set a parameter in it"),
        ({"algorithm": "heterofl"}, {}, r"algorithm is a section, got 'heterofl'.* algorithm\.name"),
        ({"learning_rate": 0.1}, {}, r"unknown parameter 'learning_rate': its dotted name is training\.lr$"),
        (None, {"algorithm": 3}, "a name, a class or an object"),
        (None, {"algorithm": dict}, "a dataclass is expected"),
        (None, {"algorithm": Ours(training=FedAvg.training.__class__(lr=7.0))}, "shared by all algorithms"),
    ],
)
def test_what_cannot_be_meant_is_one_line(options: Any, keywords: Any, said: str) -> None:
    with pytest.raises(ff.ConfigError, match=said):
        config_of(None, options, keywords)


SECRET = "https://me:geheim@host"
TELLS: dict[str, Callable[[], Any]] = {
    "options that are none": lambda: ff.run(options=SECRET),  # type: ignore[arg-type]
    "an option that is none": lambda: ff.run(options={"tracking.mlflow": {SECRET}}),
    "a keyword": lambda: ff.run(mlflow_uri={SECRET}),  # type: ignore[arg-type]
    "settings without a label": lambda: ff.compare([{"algorithm": "flexfl", "tracking.mlflow": SECRET}]),
    "labels that are none": lambda: ff.compare(SECRET),
    "factors that are none": lambda: ff.compare(["flexfl"], over=SECRET),
    "values that are none": lambda: ff.compare(["flexfl"], over={"tracking.mlflow": SECRET}),
    "a file": lambda: ff.run(config="broken.yaml"),
    "values that are no YAML": lambda: factors_of([f"tracking.mlflow={{a: {SECRET}"]),
    "no values": lambda: factors_of([SECRET]),
}


@pytest.mark.parametrize("what", TELLS)
def test_no_error_tells_a_password(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text(f"tracking: {{mlflow: {SECRET}: [\n")
    with pytest.raises(ff.ConfigError) as told:
        TELLS[what]()
    assert "geheim" not in str(told.value) and "host" in str(told.value)


def test_a_thing_without_a_name_is_refused() -> None:
    def inner() -> None: ...

    assert name_of(Ours, "algorithm") == f"{__name__}:Ours"
    with pytest.raises(ff.ConfigError, match="no name by which it is found again"):
        name_of(inner, "model")

"""params.yaml and --set: which value wins, and errors that name the parameter and the nearest name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fl_engine.aggregation.server_opt import Yogi
from fl_engine.algorithms import FedAvg
from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.text import at_home
from fl_engine.fleet.devices import FLEETS
from fl_engine.remote.settings import NodePool
from fl_engine.selection import Curiosity
from flexfleet import config as configs
from flexfleet.config import flatten, load_config
from flexfleet.experiments import tune_storage
from flexfleet.worker.mailbox import folder_of
from tests.harness.settings import refused, refused_at, written


# --------------------------------------------------------------------------------------------------- defaults
def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n")) == load_config()


# ---------------------------------------------------------------------------------------------- unknown names
@pytest.mark.parametrize(
    ("given", "named", "near"),
    [
        ("sed=1", "sed", "seed"),
        ("lr=0.1", "lr", "training.lr"),
        ("data=digits", "data", "dataset"),
        ("rounds.stp=3", "rounds.stp", "stop"),
        ("fleet.tiers=[{name: a, share: 1.0, memry: 50.0}]", "memry", "memory"),
        ("algorithm.kd_wait=3", "algorithm.kd_wait", "kd_weight"),
        ("algorithm.name=flexfll", "flexfll", "flexfl"),
        ("dataset.name=CIFAR-10", "CIFAR-10", "cifar10"),
        ("model.widht=0.5", "model.widht", "width"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(given: str, named: str, near: str) -> None:
    text = refused(given)
    assert named in text
    assert f"did you mean {near!r}" in text


# ------------------------------------------------------------------------------------------------ wrong types
@pytest.mark.parametrize(
    ("given", "path"),
    [
        ('partition.alpha="0.6"', "partition.alpha"),
        ("partition.alpha=true", "partition.alpha"),
        ("partition.clients=20.0", "partition.clients"),
        ("partition.rule=direchlet", "partition.rule"),
        ("rounds.stop=0", "rounds.stop"),
        ("training.lr=.inf", "training.lr"),
        ("run.devices=cpu", "run.devices"),
        ("fleet.tiers=[{name: a, share: half, memory: 50.0}]", "fleet.tiers.0.share"),
        ("algorithm.name=null", "algorithm.name"),
        ("algorithm.rule=closets", "algorithm.rule"),
        ("schema_version=2", "schema_version"),
        ("tune.space={training.lr: {lo: 0.01, high: 1}}", "tune.space.training.lr.lo"),
        ("codec.up.bits=4", "codec.up.bits"),
        ("algorithm.selection={name: uniform, exploration: 3}", "algorithm.selection.exploration"),
        ("publish.precision=[fp32, fp8]", "publish.precision.1"),
        ("algorithm={name: multibranch, exits: 3}", "algorithm.exits"),
    ],
)
def test_value_of_the_wrong_type_is_refused_with_its_path(given: str, path: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [given])
    assert error.value.path == path and "\n" not in str(error.value)


@dataclass(frozen=True)
class Odd(FedAvg):
    def __post_init__(self) -> None:
        raise ValueError("low is to be below high")


@pytest.mark.parametrize(
    ("sets", "path"),
    [
        (["run.backend=agents", "run.devices=[cuda]"], "run.devices"),
        (["run.devices=[cuda, cpu]"], "run.devices"),
        (["run.devices=[cuda]", "run.strategy=batched"], "run.strategy"),
        (["run.precision=fp16", "run.strategy=batched"], "run.strategy"),
        (["central.optimizer=adam", "central.momentum=.9"], "central.momentum"),
        (["evaluate.on=clients", "partition.proxy_shared=true"], "partition.proxy_shared"),
        (["partition.folders=a"], "partition.folders"),
        (["partition.rule=local", "run.backend=kubernetes"], "partition.rule"),
        (["partition.rule=local", "partition.folders=a", "rounds.faults=uphill=0.1"], "partition.rule"),
        (["rounds.over_provision=9"], "training.fraction"),
        (["tune.space={training.lr: {low: 2, high: 1}}"], "tune.space.training.lr"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(sets: list[str], path: str) -> None:
    with refused_at(path):
        load_config(None, sets)


def test_error_of_an_own_algorithm_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="low is to be below high"):
        load_config(None, [f"algorithm.name={__name__}:Odd"])


def test_every_algorithm_takes_selections_and_servers_by_name() -> None:
    selection = "algorithm.selection={name: curiosity, per_type: 1}"
    sets = ["algorithm.name=heterofl", selection, "algorithm.server.name=yogi"]
    found: Any = configs.algorithm(load_config(None, sets))
    assert (found.selection, found.server) == (Curiosity(per_type=1), Yogi())


def test_a_fleet_by_name_is_written_out() -> None:
    config = load_config(None, ["fleet.tiers=8:1:1"])
    assert config.fleet.tiers == FLEETS["8:1:1"]
    assert flatten(config)["fleet.tiers"][0]["share"] == 0.8


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:secret@mlflow:5000/x", "https://mlflow:5000/x"),
        ("postgresql://me:secret@host/db", "postgresql://host/db"),
        ("https://token@git.example.com/repo@v1:data", "https://git.example.com/repo@v1:data"),
        ("https://me:a@b@host/x", "https://host/x"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("/folder/me@home", "/folder/me@home"),
    ],
)
def test_addresses_are_shown_without_passwords(address: str, shown: str) -> None:
    assert masked(address) == shown
    found = configs.shown(configs.parse_schema({"dataset": {"root": address}}))
    assert found["dataset.root"] == shown


@pytest.mark.parametrize("address", ["https://me:geheim@host/repo@v1:data", "https://geheim@host:8443/repo@v1:data"])
def test_the_address_of_data_holds_no_password(address: str) -> None:
    said = refused(f"dataset.root={address}")
    assert "dataset.root" in said and "credential helper" in said and "geheim" not in said


PATHS = {
    "dataset.root": "~/data",
    "partition.folders": "~/clients",
    "model.init": "~/model.safetensors",
    "fleet.trace": "~/trace.csv",
    "run.store": "~/x",
    "tracking.mlflow": "sqlite:///~/mlflow.db",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("name", PATHS)
def test_parameter_with_tilde_names_the_home_folder(name: str, home: Path) -> None:
    local = ("partition.rule=local",) if name == "partition.folders" else ()
    shown = flatten(load_config(None, [*local, f"{name}={PATHS[name]}"]))
    found = shown["fleet.trace.path" if name == "fleet.trace" else name]
    assert found == PATHS[name].replace("~", str(home))


def test_variables_with_tilde_name_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "~/state")
    monkeypatch.setenv("FLEXFLEET_TUNE_STORAGE", "sqlite:///~/study.db")
    assert folder_of("a") == home / "state"
    assert tune_storage.address(load_config(None)) == f"sqlite:///{home}/study.db"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~", "{home}"),
        ("~/möbel/x", "{home}/möbel/x"),
        ("file://~/mlruns", "file://{home}/mlruns"),
        ("s3://bucket/~/x", "s3://bucket/~/x"),
        ("https://host/~user", "https://host/~user"),
        ("a~b", "a~b"),
    ],
)
def test_only_a_leading_tilde_is_the_home_folder(given: str, expected: str, home: Path) -> None:
    assert at_home(given) == expected.format(home=home)


# ------------------------------------------------------------------------------------------------------- YAML
@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("2e0", 2.0), ("+3.5e-2", 0.035), (".5", 0.5), ("5.", 5.0), ("7", 7.0)],
)
def test_numbers_are_read_in_every_notation(tmp_path: Path, text: str, value: float) -> None:
    for config in (
        load_config(None, [f"partition.alpha={text}"]),
        load_config(written(tmp_path, f"partition:\n  alpha: {text}\n")),
    ):
        assert config.partition.alpha == value
        assert isinstance(config.partition.alpha, float)


NOT_PLAIN = {
    "not closed": "rounds: {stop: 3\n",
    "key given twice": "seed: 1\nrounds: {stop: 3}\nseed: 2\n",
    "object": "seed: !!python/object/apply:os.getpid []\n",
    "date": "run: {store: 2026-01-01}\n",
}


@pytest.mark.parametrize("text", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_file_that_is_not_plain_yaml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, text))
    assert error.value.code == "config.yaml" and "params.yaml" in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError):
        load_config(tmp_path)


# -------------------------------------------------------------------------------------------------------- set
@pytest.mark.parametrize("given", ["rounds.stop", "=3", "rounds.stop:3", "rounds.stop=[3", "rounds.stop=a: b: c"])
def test_malformed_override_is_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, [given])


CUT = ["run.store=/data/exp #3/runs", "run.store=#3", "run.devices=[cpu] # all", "run.store='a' #b", "run=store: a #3",
       "run.devices=- cpu\n- cpu # b", "run={store: a, # c\n devices: [cpu]}"]  # fmt: skip


@pytest.mark.parametrize("given", CUT)
def test_an_override_that_yaml_would_cut_off_is_refused(given: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [given])
    assert (error.value.code, error.value.path) == ("config.yaml", given.partition("=")[0])


@pytest.mark.parametrize(("given", "value"), [("sqlite:///a.db?x=1", "sqlite:///a.db?x=1"), ("", None)])
def test_override_may_have_an_equals_sign_or_no_value(given: str, value: str | None) -> None:
    assert load_config(None, [f"tracking.mlflow={given}"]).tracking.mlflow == value


def test_the_last_override_wins_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "rounds: {stop: 3, evaluate_every: 2}\n")
    found = load_config(path, ["rounds.stop=5", "rounds.stop=7"]).rounds
    assert (found.stop, found.evaluate_every) == (7, 2)


def test_later_pools_change_only_the_keys_that_they_name(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    weak = "{arch: arm64, taint: edge, selector: {name: pi, room: '7'}, memory: 1Gi}"
    first.write_text(f"kubernetes: {{pools: {{weak: {weak}, strong: {{taint: gpu}}}}}}\n")
    second.write_text("kubernetes: {pools: {weak: {memory: 2Gi, selector: {name: pi4}}, medium: {cpu: '2'}}}\n")
    expected = {
        "weak": NodePool(arch="arm64", taint="edge", selector={"name": "pi4", "room": "7"}, memory="2Gi", cpu="3"),
        "medium": NodePool(cpu="2"),
        "strong": NodePool(taint="gpu"),
    }
    assert load_config([first, second], ["kubernetes.pools={weak: {cpu: '3'}}"]).kubernetes.pools == expected


@pytest.mark.parametrize("sets", [["model.name=vgg16", "model.width=0.25"], ["model.width=0.25", "model.name=vgg16"]])
def test_order_of_overrides_does_not_matter(sets: Sequence[str], tmp_path: Path) -> None:
    for path in (None, written(tmp_path, "model: {name: small_cnn, norm: static}\n")):
        assert load_config(path, sets).model == {"name": "vgg16", "width": 0.25}


def test_default_name_keeps_options() -> None:
    sets = ["algorithm.use_apoz=false", "algorithm.name=flexfl", "model.width=0.5", "model.name=small_cnn"]
    found = load_config(None, sets)
    assert found.algorithm == {"name": "flexfl", "use_apoz": False}
    assert found.model == {"name": "small_cnn", "width": 0.5}

"""params.yaml and --set: what is wrong is said, with the nearest name; nothing is converted or dropped silently."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_engine.aggregation.server_opt import Yogi
from fl_engine.algorithms import FedAvg
from fl_engine.core.errors import ConfigError, ModelError, masked
from fl_engine.core.text import at_home
from fl_engine.fleet.devices import FLEETS
from fl_engine.selection import Curiosity
from flexfleet import config as configs
from flexfleet.config import Config, flatten, load_config, parse
from flexfleet.experiments import tune_storage
from flexfleet.pipeline.prepare import Resolved
from flexfleet.worker.mailbox import folder_of
from tests.harness.settings import refused, written


# --------------------------------------------------------------------------------------------------- defaults
def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n")) == Config()


def test_a_section_given_in_part_keeps_its_other_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "algorithm:\n  kd_weight: 0\nrounds:\n  stop: 3\nmodel: {width: 0.5}\n")
    found = load_config(path)
    assert found.algorithm == {"name": "flexfl", "kd_weight": 0}
    assert found.model == {"name": "small_cnn", "width": 0.5}
    assert found.rounds.evaluate_every == 1
    assert load_config(None, ["algorithm.kd_weight=0"]).algorithm == found.algorithm


# ---------------------------------------------------------------------------------------------- unknown names
@pytest.mark.parametrize(
    ("given", "named", "near"),
    [
        ("sed=1", "sed", "seed"),
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


def test_a_sections_own_options_do_not_leak_into_another(tmp_path: Path) -> None:
    assert "did you mean" not in refused("algorithm.training=3") or "training" in refused("algorithm.training=3")
    assert "unknown parameter 'algorithm.training'" in refused("algorithm.training={lr: 1.0}")
    assert "unknown parameter 'model.classes'" in refused("model.classes=3")
    assert "unknown parameter 'algorithm.kd_weight'" in refused("algorithm.name=all_large", "algorithm.kd_weight=3")
    text = "algorithm: {name: all_large, kd_weight: 3}"
    with pytest.raises(ConfigError, match="kd_weight"):
        load_config(written(tmp_path, text))


def test_all_mistakes_are_told_at_once() -> None:
    text = refused("rounds.stp=3", "seed=x", "partition.alpha=true")
    for part in ("rounds.stp", "seed", "partition.alpha"):
        assert part in text


# ------------------------------------------------------------------------------------------------ wrong types
@pytest.mark.parametrize(
    ("given", "path"),
    [
        ('partition.alpha="0.6"', "partition.alpha"),
        ("partition.alpha=true", "partition.alpha"),
        ("partition.alpha=null", "partition.alpha"),
        ("partition.clients=20.0", "partition.clients"),
        ("partition.clients=true", "partition.clients"),
        ("partition.rule=direchlet", "partition.rule"),
        ("rounds.stop=0", "rounds.stop"),
        ("rounds.commit_every=never", "rounds.commit_every"),
        ("training.lr=0", "training.lr"),
        ("training.lr=.inf", "training.lr"),
        ("run.devices=cpu", "run.devices"),
        ("fleet.tiers=[{name: a, share: half, memory: 50.0}]", "fleet.tiers.0.share"),
        ("algorithm.name=null", "algorithm.name"),
        ("algorithm.kd_weight=-1", "algorithm.kd_weight"),
        ("algorithm.rule=closets", "algorithm.rule"),
        ("schema_version=2", "schema_version"),
    ],
)
def test_value_of_the_wrong_type_is_refused_with_its_path(given: str, path: str) -> None:
    text = refused(given)
    assert path in text
    assert "\n" not in text, "an error is one line"


def test_a_list_of_a_network_is_checked_too() -> None:
    for wrong in ('["64", 64]', "[64.5, 64]", "64", "[true, 64]"):
        with pytest.raises((ConfigError, ModelError), match="fc"):
            Resolved.load(None, ["model.name=vgg16", f"model.fc={wrong}"]).network((3, 32, 32), 10)


# -------------------------------------------------------------------------------------------- what comes of it
def test_a_configuration_survives_json_and_yaml() -> None:
    sets = ["model.name=vgg16", "model.fc=[64, 64]", "training.lr=1e-3", "algorithm.kd_weight=3", "dataset.pad=32"]
    config = load_config(None, sets)
    values = config.model_dump(mode="json")
    assert parse(values) == config
    assert parse(yaml.safe_load(yaml.safe_dump(values))) == config
    assert not any(isinstance(v, float) and math.isnan(v) for v in flatten(config).values())


# -------------------------------------------------------------------- selections, server optimisers, named fleets


@dataclass(frozen=True)
class Odd(FedAvg):
    def __post_init__(self) -> None:
        raise ValueError("low is to be below high")


@pytest.mark.parametrize(
    ("sets", "path"),
    [
        (["run.backend=agents", "run.devices=[cuda]"], r"run\.devices"),
        (["run.devices=[cuda, cpu]"], r"run\.devices"),
        (["run.devices=[cuda]", "run.strategy=batched"], r"run\.strategy"),
        (["central.optimizer=adam", "central.momentum=.9"], r"central\.momentum"),
        (["tune.space={training.lr: {low: 2, high: 1}}"], r"tune\.space\.training\.lr"),
        ([f"algorithm.name={__name__}:Odd"], "algorithm"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(sets: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_config(None, sets)


def test_every_algorithm_takes_selections_and_servers_by_name() -> None:
    selection = "algorithm.selection={name: curiosity, per_type: 1}"
    sets = ["algorithm.name=heterofl", selection, "algorithm.server.name=yogi"]
    found: Any = configs.algorithm(load_config(None, sets))
    assert (found.selection, found.server) == (Curiosity(per_type=1), Yogi())


def test_a_fleet_by_name_is_written_out() -> None:
    config = load_config(None, ["fleet.tiers=8:1:1"])
    assert config.fleet.tiers == FLEETS["8:1:1"]
    assert flatten(config)["fleet.tiers"][0]["share"] == 0.8


def test_an_algorithm_that_wants_early_exits_gets_them() -> None:
    resolved = Resolved.load(None, ["algorithm.name=scalefl", "algorithm.exits=[conv2, conv3]"])
    assert resolved.network((1, 8, 8), 10).exits == ("conv2", "conv3")  # type: ignore[attr-defined]
    assert Resolved.load().network((1, 8, 8), 10).exits == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:secret@mlflow:5000/x", "https://mlflow:5000/x"),
        ("postgresql://me:secret@host/db", "postgresql://host/db"),
        ("https://token@git.example.com/repo@v1:data", "https://git.example.com/repo@v1:data"),
        ("https://me:a@b@host/x", "https://host/x"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("/folder/me@home", "/folder/me@home"),
    ],
)
def test_addresses_are_shown_without_who_asks(address: str, shown: str) -> None:
    assert masked(address) == shown
    found = configs.shown(configs.parse_schema({"dataset": {"root": address}}))
    assert found["dataset.root"] == shown


@pytest.mark.parametrize("address", ["https://me:geheim@host/repo@v1:data", "https://geheim@host:8443/repo@v1:data"])
def test_the_address_of_data_holds_no_password(address: str) -> None:
    said = refused(f"dataset.root={address}")
    assert "dataset.root" in said and "credential helper" in said and "geheim" not in said


# --------------------------------------------------------------------------------------------- what a value moves
def test_sections_with_addresses_are_not_told_to_clients() -> None:
    assert set(configs.PRIVATE) == {"tracking", "tune", "publish"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tune.space={training.lr: {lo: 0.01, high: 1}}",
         "unknown parameter 'tune.space.training.lr.lo' (did you mean 'low'?)"),
        ("kubernetes.pools={weak: {selectr: {a: b}}}",
         "unknown parameter 'kubernetes.pools.weak.selectr' (did you mean 'selector'?)"),
        ("codec.up.bits=4",
         "unknown parameter 'codec.up.bits': codec.up.name=identity has no options; codec.up.name=qsgd has it"),
        ("algorithm.selection={name: uniform, exploration: 3}",
         "unknown parameter 'algorithm.selection.exploration' (known: model); algorithm.selection.name=oort has it"),
        ("publish.precision=[fp32, fp8]",
         "publish.precision.1: input should be 'fp32', 'fp16', 'int8' or 'int8_static', got 'fp8'"),
        ("algorithm={name: multibranch, exits: 3}",
         "algorithm.exits: input should be a valid string, or a list, such as [3], got 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_a_hint_that_holds(given: str, said: str) -> None:
    told = refused(given)
    assert told.startswith(said) if said.endswith(" ") else told.endswith(said)
    assert ";" not in told.removesuffix(said), "one mistake is told once"


PATHS = {
    "dataset.root": "~/data",
    "partition.map": "~/map.json",
    "partition.folders": "~/clients",
    "partition.features": "~/features.npy",
    "model.init": "~/model.safetensors",
    "fleet.trace": "~/trace.csv",
    "run.store": "~/x",
    "run.remote": "~/remote",
    "run.secrets": "~/keys",
    "tracking.mlflow": "sqlite:///~/mlflow.db",
    "publish.dvc": "~/dvc",
    "tune.storage": "sqlite:///~/study.db",
    "kubernetes.template": "~/job.yaml",
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


def test_code_with_tilde_is_found_in_the_home_folder(home: Path) -> None:
    (home / "theirs.py").write_text("LEVELS = 3\n")
    assert load_config(None, ["run.code=~/theirs.py"]).run.code == str(home / "theirs.py")


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
        ("sqlite+pysqlite:///~/m.db?timeout=9", "sqlite+pysqlite:///{home}/m.db?timeout=9"),
        ("./~/x", "./~/x"),
        ("s3://bucket/~/x", "s3://bucket/~/x"),
        ("https://host/~user", "https://host/~user"),
        ("a~b", "a~b"),
    ],
)
def test_only_a_leading_tilde_is_the_home_folder(given: str, expected: str, home: Path) -> None:
    assert at_home(given) == expected.format(home=home)


def test_home_of_an_unknown_user_is_refused(home: Path) -> None:
    for setting in ("run.store=~nobody-of-this-name/x", "model.init=~nobody-of-this-name/x"):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [setting])
        assert str(refused.value).startswith(setting.partition(".")[0])

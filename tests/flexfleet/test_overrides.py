"""Short options, `--set` and forms of pipelines become the same configuration, or an error with the parameter."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from fl_engine.algorithms.flexfl import FlexFL
from fl_engine.core.errors import ConfigError, holds_password
from fl_engine.core.text import read_yaml, write_yaml
from fl_engine.storage.s3 import check_place, open_store
from flexfleet.cli import main as cli
from flexfleet.config import Config, flatten, load_config
from flexfleet.config.comparison_runs import entries_from, label_overrides
from flexfleet.config.dotted import SHORT, parse_sets
from flexfleet.config.form import MOST_RUNS, comparison_from, config_from, restore_integers, run_name
from flexfleet.experiments import tune
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved, config_of
from tests.harness.settings import refused_at

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mine(FlexFL):
    """An algorithm of the user's own."""


def test_parameters_and_advanced_do_what_set_does() -> None:
    given = {"model": "vgg16", "clients": 7, "learning_rate": 1, "mlflow_uri": "", "store_uri": "/mnt/runs"}
    # As protobuf hands them on: every number a float.
    advanced = {"algorithm.kd_weight": 5.0, "pretrain.epochs": 3.0, "model.fc": [64.0, 32.0], "training.momentum": 0.9}
    sets = ["model.name=vgg16", "partition.clients=7", "training.lr=1", "tracking.mlflow=null", "run.store=/mnt/runs"]
    sets += ["algorithm.kd_weight=5", "pretrain.epochs=3", "model.fc=[64, 32]", "training.momentum=0.9"]
    assert config_from(given, advanced) == load_config(ROOT / "params.yaml", sets)


ODD = ("1e3", "12e5", "1e-3", "089", "+5", ".5", "1:30", "0x1f", "null", "~", "yes", "=", "<<", "2001-01-01", "", " a ")
ODD += ("\U0001f600", "\x85", "\x7f", "\ufeff", "a\n\n b\r\n", "\u2028", "#", "a: b", "on", ".inf", "1_000", "- a")
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")) | st.text("-+019.eE_:", max_size=6)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


class Quoting(yaml.SafeDumper):
    """Quotes every text, as JSON does."""


Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def in_line(value: object) -> str:
    """Write plain data as YAML in one line, as a user would for `--set`."""
    text = yaml.dump(value, Dumper=Quoting, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()


@hypothesis.given(PLAIN)
@hypothesis.example(list(ODD))
@hypothesis.example({text: text for text in ODD})
@hypothesis.example(1e-7)
def test_plain_data_are_read_as_they_were_written(value: object) -> None:
    assert repr(read_yaml(write_yaml({"a": value}))) == repr({"a": value})
    assert repr(parse_sets([f"a.b={in_line(value)}"])) == repr({"a.b": value})


@pytest.mark.parametrize(
    ("before", "after"),
    [(5.0, 5), (-2.0, -2), (0.5, 0.5), (5, 5), (True, True), ("5.0", "5.0"), (None, None)],
)
def test_whole_numbers(before: object, after: object) -> None:
    for given, expected in ((before, after), ({"a": [before, {"b": before}]}, {"a": [after, {"b": after}]})):
        assert (restore_integers(given), repr(restore_integers(given))) == (expected, repr(expected))
    assert restore_integers(float("inf")) == float("inf")


FORM = dict.fromkeys(SHORT, "") | {"dataset": "digits", "model": "small_cnn", "algorithm": "flexfl", "clients": 6}
FORM |= {"partition_rule": "iid", "dirichlet_alpha": 0.6, "rounds": 3, "client_fraction": 0.3, "local_epochs": 1}
FORM |= {"learning_rate": 0.05, "seed": 0}


@pytest.mark.parametrize(
    ("parameters", "advanced", "path"),
    [
        ({"client": 5}, {}, "client"),
        ({}, {"algorithm.kd_wight": 5}, "algorithm.kd_wight"),
        ({"clients": 0}, {}, "partition.clients"),
        ({}, {"partition.clients": 5}, "partition.clients"),
        ({}, {"run.remote": "s3://bucket/runs"}, "run.remote"),
        ({}, {"tune.trials": 3}, "tune.trials"),
        ({}, {"partition": {"minimum": 5}}, "partition"),
        ({}, {"seed.x": 5}, "seed"),
        ({}, ["rounds.stop"], "advanced"),
        ({}, '{"rounds.stop": 3}', "advanced"),
        ({}, None, "advanced"),
    ],
)
def test_form_names_the_wrong_parameter(parameters: dict[str, object], advanced: Any, path: str) -> None:
    with refused_at(path):
        config_from({**FORM, **parameters}, advanced)


@pytest.mark.parametrize(
    ("field", "own"), [("dataset", "casas"), ("model", "resnet18"), ("algorithm", f"{__name__}:Mine")]
)
def test_advanced_replaces_a_name_of_the_forms_lists(field: str, own: str) -> None:
    assert flatten(config_from(FORM, {SHORT[field]: own}))[SHORT[field]] == own


def test_label_of_a_form_has_its_own_settings() -> None:
    advanced = {"b:partition.alpha": 0.1, "b:algorithm.kd_weight": 0, "training.momentum": 0.9}
    runs = comparison_from({"dirichlet_alpha": 0.3}, advanced, "a=flexfl,b=flexfl", "0", "x")
    assert [run.config.partition.alpha for run in runs] == [0.3, 0.1]
    assert [run.config.training.momentum for run in runs] == [0.9, 0.9]
    with refused_at("partition.alpha"):
        comparison_from({"dirichlet_alpha": 0.3}, {"partition.alpha": 0.1}, "a=flexfl", "0", "x")


def test_run_names_and_folders() -> None:
    config = config_from({"store_uri": "/mnt/runs", "seed": 3}, {})
    assert run_name("", "8d1f", config) == "flexfl-s3-8d1f"
    assert config.run.store == "/mnt/runs"
    for bad in ("../mine", "a/b", ".hidden", ".."):
        with pytest.raises(ConfigError):
            run_name(bad, "8d1f", config)
    config = config_from({"store_uri": "s3://bucket/runs"}, {})
    assert (config.run.remote, config.run.store) == ("s3://bucket/runs", "runs")


@pytest.mark.parametrize("address", ["s3:/b", "s3//b", "http://s3.example.com/b", "file:///mnt/runs", "minio:9000/b"])
def test_malformed_address_is_not_a_folder(address: str) -> None:
    for refused in (
        lambda: config_from({"store_uri": address}, {}),
        lambda: comparison_from({"store_uri": address}, {}, "flexfl", "0", "a"),
        lambda: check_place("store_uri", address),
        lambda: load_config(None, [f"run.store={in_line(address)}"]),
        lambda: open_store(address),
    ):
        with pytest.raises(ConfigError):
            refused()


@pytest.mark.parametrize("name", ["run.remote", "run.secrets", "publish.dvc"])
def test_parameters_of_places_refuse_malformed_addresses(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be"):
        check(Resolved.of(load_config(None, [f"{name}=s3:/b"])))


def test_pipeline_refuses_too_many_runs_and_workers(tmp_path: Path) -> None:
    seeds = ",".join(map(str, range(MOST_RUNS + 1)))
    with pytest.raises(ConfigError, match="got 81"):
        comparison_from({}, {}, "flexfl", seeds, "a")
    with refused_at("tune.workers"):
        tune.prepare(config_from({}, {"tune.workers": MOST_RUNS + 1}), "a", tmp_path, "job")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "address",
    [
        "http://me:secret@mlflow:5000", "postgresql://me:secret@host/db", "https://token@git.example.com/repo@v1:data",
        "postgresql://me:a/b@c@host/db", "postgresql://host/db?user=me&password=secret", "s3://key:secret@bucket/x",
        "mysql+pymysql://:secret@host/db", "a http://host and http://me:secret@host",
    ],
)  # fmt: skip
def test_form_refuses_passwords(address: str) -> None:
    assert holds_password(address)
    for refused in (
        lambda: config_from({"mlflow_uri": address}, {}),
        lambda: config_from({}, {"tune.space": {"model.name": {"choices": ["a", address]}}}),
        lambda: comparison_from({}, {"flexfl:algorithm.x": address}, "flexfl", "0", "a"),
    ):
        with pytest.raises(ConfigError, match="must not contain a password") as error:
            refused()
        assert "secret" not in str(error.value)


VALUES = {
    "dataset": "mnist", "model": "vgg16", "algorithm": "heterofl", "clients": "7", "partition_rule": "iid",
    "dirichlet_alpha": "0.25", "rounds": "3", "client_fraction": "0.5", "local_epochs": "2", "learning_rate": "1e-3",
    "seed": "9", "mlflow_uri": "null", "store_uri": "elsewhere",
}  # fmt: skip


def parsed(*argv: str) -> argparse.Namespace:
    args = cli.parser().parse_args(argv)
    cli.terminal.settle(args)
    return args


# ------------------------------------------------------------------------------------------- short options
@pytest.mark.parametrize("command", ["run", "check"])
def test_short_options_set_their_dotted_names(command: str) -> None:
    given = [word for name, value in VALUES.items() for word in (f"--{name.replace('_', '-')}", value)]
    sets = [word for name, value in VALUES.items() for word in ("--set", f"{SHORT[name]}={value}")]
    config = config_of(parsed(command, *given))
    assert config == config_of(parsed(command, *sets)) != Config()


def test_an_address_with_a_scheme_is_the_remote_place() -> None:
    config = config_of(parsed("check", "--store-uri", "s3://bucket/runs", "--set", "run.store=here"))
    assert (config.run.remote, config.run.store) == ("s3://bucket/runs", "here")


@pytest.mark.parametrize(
    "argv",
    [
        ("--rounds", "5", "--set", "rounds.stop=5"),
        ("--rounds", "5", "--set", "rounds={stop: 5}"),
        ("--rounds", "5", "--rounds", "5"),
        ("--algorithm", "heterofl", "--set", "algorithm={name: heterofl}"),
        ("--store-uri", "s3://b/p", "--set", "run.remote=s3://b/q"),
        ("--faults", "drop=0.1", "--set", "rounds.faults=drop=0.1"),
    ],
)
def test_a_parameter_given_twice_is_an_error(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="set twice"):
        parsed("run", *argv)


# ------------------------------------------------------------------------------------------- sections
def test_a_section_is_merged_into_what_stands() -> None:
    """`algorithm={on_too_small: fail}` over heterofl ran flexfl once."""
    config = load_config(None, ["algorithm.name=heterofl", "algorithm={on_too_small: fail}"])
    assert config.algorithm == {"name": "heterofl", "on_too_small": "fail"}
    config = load_config(None, ["training={lr: 0.5}", "training.epochs=2"])
    assert (config.training.lr, config.training.epochs, config.training.batch_size) == (0.5, 2, 10)


def test_another_name_drops_the_options_of_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("algorithm: {name: fedprox, mu: 0.5}\ntraining: {schedule: {name: cosine, floor: 0.1}}\n")
    assert load_config(file, ["algorithm={name: heterofl}"]).algorithm == {"name": "heterofl"}
    assert load_config(file, ["algorithm={name: fedprox}"]).algorithm == {"name": "fedprox", "mu": 0.5}
    assert load_config(file, ["algorithm={mu: 0.25}"]).algorithm == {"name": "fedprox", "mu": 0.25}
    assert load_config(file, ["training={schedule: {name: constant}}"]).training == Config().training
    assert load_config(file, ["training.schedule.name=constant"]).training == Config().training


def test_a_label_of_a_comparison_takes_sections_too() -> None:
    sets = parse_sets(["b:algorithm={on_too_small: fail}", "training={lr: 0.5}", "b:training={lr: 0.25}"])
    names = {"a": "heterofl", "b": "heterofl"}
    a, b = entries_from(label_overrides(names, sets), (0,), partial(load_config, None), "x")
    assert a.config.algorithm == {"name": "heterofl"} and a.config.training.lr == 0.5
    assert b.config.algorithm == {"name": "heterofl", "on_too_small": "fail"} and b.config.training.lr == 0.25
    for hidden in ("b:algorithm={name: flexfl}", "algorithm={name: flexfl}"):
        with refused_at("algorithm.name"):
            label_overrides(names, parse_sets([hidden]))

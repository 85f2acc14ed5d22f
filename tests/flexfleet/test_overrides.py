"""What a pipeline's form says becomes the configuration that params.yaml would, or one clear error."""

from __future__ import annotations

from dataclasses import dataclass
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
from flexfleet.config import Config, flatten, load_config, parse
from flexfleet.config.form import (
    MOST_RUNS,
    PARAMETERS,
    comparison_from,
    config_from,
    overrides_of,
    run_folder,
    run_name,
    whole,
    write_config,
)
from flexfleet.config.overrides import parse_sets
from flexfleet.experiments import tune
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mine(FlexFL):
    """An algorithm of the user's own."""


def test_nothing_given_is_the_defaults() -> None:
    assert config_from({}, {}) == Config()


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


@pytest.mark.parametrize("text", ODD)
def test_configuration_with_an_odd_text_survives_the_file(text: str, tmp_path: Path) -> None:
    config = parse({"tracking": {"experiment": text}})
    assert load_config(write_config(config, tmp_path / "params.yaml")) == config
    assert load_config(None, overrides_of("", "runs", {"tracking.experiment": text})).tracking.experiment == text


@pytest.mark.parametrize("value", ["!!int []", "!!timestamp 5", "!!binary [a]"])
def test_a_tag_that_lies_is_no_valid_yaml(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--set .*not valid YAML"):
        parse_sets([f"a={value}"])


def test_every_parameter_has_its_own_place() -> None:
    assert len(set(PARAMETERS.values())) == len(PARAMETERS)


@pytest.mark.parametrize(
    ("before", "after"),
    [(5.0, 5), (-2.0, -2), (0.5, 0.5), (5, 5), (True, True), ("5.0", "5.0"), (None, None)],
)
def test_whole_numbers(before: object, after: object) -> None:
    for given, expected in ((before, after), ({"a": [before, {"b": before}]}, {"a": [after, {"b": after}]})):
        assert (whole(given), repr(whole(given))) == (expected, repr(expected))
    assert whole(float("inf")) == float("inf")


@pytest.mark.parametrize(
    ("parameters", "advanced", "message"),
    [
        ({"client": 5}, {}, r"unknown parameter 'client' \(did you mean 'clients'\?\)"),
        ({}, {"algorithm.kd_wight": 5}, r"unknown parameter 'algorithm.kd_wight' \(did you mean 'kd_weight'\?\)"),
        ({"clients": 0}, {}, r"partition.clients: .* greater than or equal to 1, got 0"),
        ({"algorithm": "fedavgg"}, {}, r"no algorithm named 'fedavgg'"),
        ({}, {"partition.clients": 5}, r"'partition.clients' is the parameter 'clients', set it there"),
        ({}, {"partition": {"minimum": 5}}, r'advanced takes dotted names, \{"partition.minimum": value\}'),
        ({}, {"seed.x": 5}, r"seed.x: 'seed' is a value, not a section"),
    ],
)
def test_bad_input_is_a_clear_error(parameters: dict[str, object], advanced: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from(parameters, advanced)


@pytest.mark.parametrize(
    ("field", "listed", "path", "own"),
    [
        ("dataset", "casas", "dataset.name", "digits"),
        ("model", "vgg16", "model.name", "resnet18"),
        ("algorithm", "fedavg", "algorithm.name", f"{__name__}:Mine"),
    ],
)
def test_advanced_replaces_a_name_of_the_forms_lists(field: str, listed: str, path: str, own: str) -> None:
    assert flatten(config_from({field: listed}, {path: own}))[path] == own


def test_the_resolved_configuration_survives_the_file(tmp_path: Path) -> None:
    config = config_from({"learning_rate": 1e-5, "mlflow_uri": ""}, {"algorithm.targets": [10.0, 100.0]})
    assert load_config(write_config(config, tmp_path / "new" / "config")) == config


def test_label_may_override_a_field_of_the_form() -> None:
    advanced = {"b:partition.alpha": 0.1, "b:algorithm.kd_weight": 0, "training.momentum": 0.9}
    runs = comparison_from({"dirichlet_alpha": 0.3}, advanced, "a=flexfl,b=flexfl", "0", "x")
    assert [run.config.partition.alpha for run in runs] == [0.3, 0.1]
    assert [run.config.training.momentum for run in runs] == [0.9, 0.9]
    with pytest.raises(ConfigError, match="'dirichlet_alpha', set it there"):
        comparison_from({}, {"partition.alpha": 0.1}, "a=flexfl", "0", "x")


def test_run_names_and_folders() -> None:
    config = config_from({"store_uri": "/mnt/runs", "seed": 3}, {})
    assert run_name("", "8d1f", config) == "flexfl-s3-8d1f"
    assert run_folder(config, run_name("mine", "8d1f", config)) == Path("/mnt/runs/mine")
    for bad in ("../mine", "a/b", ".hidden", ".."):
        with pytest.raises(ConfigError, match="run_id is a plain name"):
            run_name(bad, "8d1f", config)
    config = config_from({"store_uri": "s3://bucket/runs"}, {})
    assert (config.run.remote, run_folder(config, "mine")) == ("s3://bucket/runs", Path("runs/mine"))
    with pytest.raises(ConfigError, match=r"'run\.remote' is the parameter 'store_uri'"):
        config_from({}, {"run.remote": "s3://bucket/runs"})
    with pytest.raises(ConfigError, match=r"set run\.remote=s3://bucket/prefix"):
        load_config(None, ("run.store=s3://bucket/runs",))


@pytest.mark.parametrize("given", [[], ["rounds.stop"], "rounds.stop", '{"rounds.stop": 3}', 3.0, True, None])
def test_advanced_that_is_no_object_is_said(given: Any) -> None:
    for refused in (
        lambda: config_from({}, given),
        lambda: comparison_from({}, given, "flexfl", "0", "a"),
        lambda: overrides_of("", "runs", given),
    ):
        with pytest.raises(
            ConfigError, match=r'^advanced is one JSON object of dotted names, as \{"alg.*\}, or .*, got'
        ):
            refused()


@pytest.mark.parametrize(
    "address",
    [
        "s3:/b", "s3:b", "s3//b", "http://s3.example.com/b",
        "gs://b", "file:///mnt/runs", "minio:9000/b", " s3://b",
    ],
)  # fmt: skip
def test_what_was_meant_as_an_address_is_no_folder(address: str) -> None:
    for refused in (
        lambda: config_from({"store_uri": address}, {}),
        lambda: comparison_from({"store_uri": address}, {}, "flexfl", "0", "a"),
        lambda: overrides_of("", address, {}),
        lambda: check_place("store_uri", address),
    ):
        with pytest.raises(ConfigError, match=r"store_uri"):
            refused()
    if not address.startswith(" "):
        with pytest.raises(ConfigError, match=r"run\.store: a folder of this machine is expected"):
            load_config(None, [f"run.store={in_line(address)}"])
        with pytest.raises(ConfigError, match=r"is s3://bucket/prefix"):
            open_store(address)


@pytest.mark.parametrize("name", ["run.remote", "run.secrets", "publish.dvc"])
def test_parameters_of_places_refuse_malformed_addresses(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be"):
        check(Resolved.of(load_config(None, [f"{name}=s3:/b"])))


def test_comparison_with_too_many_runs_is_refused() -> None:
    seeds = ",".join(map(str, range(MOST_RUNS // 2 + 1)))
    with pytest.raises(ConfigError, match=r"2 algorithms with 41 seeds are 82 runs, and a pipeline makes at most 80"):
        comparison_from({}, {}, "flexfl,all_large", seeds, "a")
    assert len(comparison_from({}, {}, "flexfl,all_large", seeds.rpartition(",")[0], "a")) == MOST_RUNS


def test_a_study_has_no_more_workers_than_a_pipeline_can_gather(tmp_path: Path) -> None:
    most = config_from({}, {"tune.workers": MOST_RUNS + 1})
    with pytest.raises(ConfigError, match=r"tune.workers is 81, and a pipeline has at most 80"):
        tune.prepare(most, "a", tmp_path, "job")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"set tune\.storage"):  # the next thing that is checked
        tune.prepare(config_from({}, {"tune.workers": MOST_RUNS}), "a", tmp_path, "job")


@pytest.mark.parametrize(
    "address",
    [
        "http://me:secret@mlflow:5000", "postgresql://me:secret@host/db", "https://token@git.example.com/repo@v1:data",
        "postgresql://me:a/b@c@host/db", "postgresql://host/db?user=me&password=secret", "s3://key:secret@bucket/x",
        "mysql+pymysql://:secret@host/db", "a http://host and http://me:secret@host",
    ],
)  # fmt: skip
def test_a_password_is_seen_however_it_is_written(address: str) -> None:
    assert holds_password(address)
    for refused in (
        lambda: config_from({"mlflow_uri": address}, {}),
        lambda: config_from({}, {"tune.space": {"model.name": {"choices": ["a", address]}}}),
        lambda: comparison_from({}, {"flexfl:algorithm.x": address}, "flexfl", "0", "a"),
        lambda: overrides_of(address, "runs", {}),
        lambda: overrides_of("", "runs", {"tracking.experiment": address}),
    ):
        with pytest.raises(ConfigError, match="holds a password, and Kubeflow shows parameters") as error:
            refused()
        assert "secret" not in str(error.value)

"""How params.yaml and --set are read: YAML, and which value wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.remote.settings import NodePool
from flexfleet.config import load_config
from flexfleet.config.overrides import giving_way
from flexfleet.config.read import read_file
from tests.harness.settings import refused, written


# ------------------------------------------------------------------------------------------------------- YAML
@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("2e0", 2.0), ("+3.5e-2", 0.035), (".5", 0.5), ("5.", 5.0), ("7", 7.0)],
)
def test_numbers_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    for config in (
        load_config(None, [f"partition.alpha={text}"]),
        load_config(written(tmp_path, f"partition:\n  alpha: {text}\n")),
    ):
        assert config.partition.alpha == value
        assert isinstance(config.partition.alpha, float)


@pytest.mark.parametrize("text", ["a: [1, 2\n", "rounds: {stop: 3\n"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML") as error:
        load_config(written(tmp_path, text))
    assert "params.yaml" in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed"):
        load_config(written(tmp_path, "seed: 1\nrounds: {stop: 3}\nseed: 2\n"))


def test_a_file_without_end_is_not_read_to_it() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero has more than 4,194,304 characters: is it a configuration\?$"):
        load_config("/dev/zero")


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config(written(tmp_path, "seed: !!python/object/apply:os.getpid []\n"))
    with pytest.raises(ConfigError):
        load_config(written(tmp_path, "run: {store: 2026-01-01}\n"))


# -------------------------------------------------------------------------------------------------------- set
@pytest.mark.parametrize("given", ["rounds.stop", "=3", " =3", "", "rounds.stop:3"])
def test_an_override_is_a_name_and_a_value(given: str) -> None:
    assert "a.b=value" in refused(given)


@pytest.mark.parametrize("given", ["rounds.stop=[3", "rounds.stop={a: ", "rounds.stop=a: b: c"])
def test_an_override_whose_value_is_no_yaml_is_refused(given: str) -> None:
    text = refused(given)
    assert "rounds.stop" in text
    assert "YAML" in text


CUT = ["run.store=/data/exp #3/runs", "run.store=#3", "run.devices=[cpu] # all", "run.store='a' #b", "run=store: a #3",
       "run.devices=- cpu\n- cpu # b", "run={store: a, # c\n devices: [cpu]}"]  # fmt: skip


@pytest.mark.parametrize("given", CUT)
def test_an_override_that_yaml_would_cut_off_is_refused(given: str) -> None:
    text = refused(given)
    assert given.partition("=")[0] in text
    assert "comment" in text


@pytest.mark.parametrize("given", ['"/data/exp #3/runs"', "'/data/exp #3/runs'", "|-\n  /data/exp #3/runs"])
def test_a_value_in_quotes_may_hold_what_begins_a_comment(given: str) -> None:
    assert load_config(None, [f"run.store={given}"]).run.store == "/data/exp #3/runs"
    assert load_config(None, ["run.store=a#3"]).run.store == "a#3"


def test_a_value_may_hold_an_equals_sign() -> None:
    assert load_config(None, ["tracking.mlflow=sqlite:///a.db?x=1"]).tracking.mlflow == "sqlite:///a.db?x=1"


def test_an_empty_value_is_null() -> None:
    assert load_config(None, ["tracking.mlflow="]).tracking.mlflow is None


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
    below = read_file(first)["kubernetes"]
    kept = list(giving_way(["kubernetes.pools", "kubernetes.namespace"], "kubernetes", {**below, "namespace": "a"}))
    assert kept == [("kubernetes.pools", below["pools"])], "a suite's pools, to be set before those that are given"


@pytest.mark.parametrize("sets", [["model.name=vgg16", "model.width=0.25"], ["model.width=0.25", "model.name=vgg16"]])
def test_overrides_mean_the_same_in_any_order(sets: Sequence[str], tmp_path: Path) -> None:
    for path in (None, written(tmp_path, "model: {name: small_cnn, norm: static}\n")):
        assert load_config(path, sets).model == {"name": "vgg16", "width": 0.25}


def test_naming_the_default_drops_nothing() -> None:
    sets = ["algorithm.use_apoz=false", "algorithm.name=flexfl", "model.width=0.5", "model.name=small_cnn"]
    found = load_config(None, sets)
    assert found.algorithm == {"name": "flexfl", "use_apoz": False}
    assert found.model == {"name": "small_cnn", "width": 0.5}

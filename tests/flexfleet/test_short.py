"""The command line's short options, sections given by `--set`, several files, and how much is told."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.cli import main as cli
from flexfleet.config import Config, load_config
from flexfleet.config.comparison_runs import entries_from, label_overrides
from flexfleet.config.form_fields import SHORT
from flexfleet.config.overrides import parse_sets
from flexfleet.pipeline.prepare import config_of

VALUES = {
    "dataset": "mnist", "model": "vgg16", "algorithm": "heterofl", "clients": "7", "partition_rule": "iid",
    "dirichlet_alpha": "0.25", "rounds": "3", "client_fraction": "0.5", "local_epochs": "2", "learning_rate": "1e-3",
    "seed": "9", "mlflow_uri": "null", "store_uri": "elsewhere",
}  # fmt: skip
LOGGERS = ("flexfleet", "fl_engine")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def parsed(*argv: str) -> argparse.Namespace:
    args = cli.parser().parse_args(argv)
    cli.terminal.settle(args)
    return args


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ------------------------------------------------------------------------------------------- short options
@pytest.mark.parametrize("command", ["run", "check"])
def test_short_options_set_their_dotted_names(command: str) -> None:
    given = [word for name, value in VALUES.items() for word in (option(name), value)]
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
    with pytest.raises(ConfigError, match="given twice"):
        parsed("run", *argv)


def test_section_beside_a_short_option_sets_other_parameters() -> None:
    config = config_of(parsed("check", "--rounds", "5", "--set", "rounds={evaluate_every: 2}"))
    assert (config.rounds.stop, config.rounds.evaluate_every) == (5, 2)


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


def test_mappings_with_keys_of_the_user_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("tune: {space: {training.lr: {low: 0.1, high: 1}}}\n")
    config = load_config(file, ["tune={space: {training.momentum: {low: 0, high: 1}}, trials: 3}"])
    assert list(config.tune.space) == ["training.momentum"] and config.tune.trials == 3


def test_a_label_of_a_comparison_takes_sections_too() -> None:
    sets = parse_sets(["b:algorithm={on_too_small: fail}", "training={lr: 0.5}", "b:training={lr: 0.25}"])
    names = {"a": "heterofl", "b": "heterofl"}
    a, b = entries_from(label_overrides(names, sets), (0,), partial(load_config, None), "x")
    assert a.config.algorithm == {"name": "heterofl"} and a.config.training.lr == 0.5
    assert b.config.algorithm == {"name": "heterofl", "on_too_small": "fail"} and b.config.training.lr == 0.25
    for hidden in ("b:algorithm={name: flexfl}", "algorithm={name: flexfl}"):
        with pytest.raises(ConfigError, match="the algorithms are given as a list"):
            label_overrides(names, parse_sets([hidden]))

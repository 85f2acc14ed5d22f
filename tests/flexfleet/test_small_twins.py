"""Every small twin of a published table runs: two rounds of all its rows, on files of the official formats with
contents that are made up. The rows are the twin's own; what is set here makes them smaller only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from fl_engine.datasets import DATASETS, femnist, tiny_imagenet, widar
from fl_engine.datasets.cifar import CIFAR10, CIFAR100
from fl_engine.datasets.mnist import FASHION_MNIST
from flexfleet.config import Config, flatten, load_config
from flexfleet.experiments import published_suites
from flexfleet.experiments.compare import run_comparison
from flexfleet.experiments.executor import one_by_one
from flexfleet.reports.page import escaped
from tests.data import made, sensors

SMALL = [name for name in published_suites.names() if name.endswith("-small")]
AT_MOST = {
    "dataset.train_samples": 200,
    "dataset.test_samples": 40,
    "partition.clients": 8,
    "partition.minimum": 10,
    "pretrain.epochs": 1,
    "training.epochs": 1,
    "training.batch_size": 10,
    "model.width": 0.1,
}
AT_LEAST = {"partition.proxy": 0.05}
"""Where there is one: a percent of so few samples is none."""
RECORDS = 100
"""Of each file of CIFAR-10, and in all of CIFAR-100's two."""


def cifar10_files(root: Path) -> Callable[[Path], Any]:
    made.cifar10_files(root, RECORDS)
    return replace(CIFAR10, checksums={}, samples=(5 * RECORDS, RECORDS)).load


def cifar100_files(root: Path) -> Callable[[Path], Any]:
    made.cifar100_files(root, (4 * RECORDS, RECORDS))
    return replace(CIFAR100, samples=(4 * RECORDS, RECORDS)).load


def fashion_mnist_files(root: Path) -> Callable[[Path], Any]:
    made.idx_files(root, FASHION_MNIST.files, (4 * RECORDS, RECORDS), 10)
    return replace(FASHION_MNIST, checksums={}, samples=(4 * RECORDS, RECORDS)).load


def tiny_imagenet_files(root: Path) -> Callable[[Path], Any]:
    made.tiny_imagenet_files(root, made.WNIDS[:20], train=20, val=4)
    return tiny_imagenet.load


def femnist_files(root: Path) -> Callable[[Path], Any]:
    writers = {f"f{number:04}": 40 for number in range(10)}
    return partial(femnist.load, files=made.femnist_files(root, made.femnist_file(writers)))


def widar_files(root: Path) -> Callable[[Path], Any]:
    sensors.write_widar(root, users=8, gestures=widar.GESTURES)
    return widar.load


FILES: dict[str, Callable[[Path], Callable[[Path], Any]]] = {
    "cifar10": cifar10_files,
    "cifar100": cifar100_files,
    "fashion_mnist": fashion_mnist_files,
    "tiny_imagenet": tiny_imagenet_files,
    "femnist": femnist_files,
    "widar": widar_files,
}
"""By data set: writes its files, and gives what reads them without the official checksums."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@cache
def reader(name: str, root: Path) -> Callable[[Path], Any]:
    return cache(FILES[name](root))


def smaller(config: Config) -> dict[str, Any]:
    """Of the settings that make a run long, or need more samples than there are, those that are too large here."""
    has = flatten(config)
    out: dict[str, Any] = {
        path: most for path, most in AT_MOST.items() if path in has and (has[path] is None or has[path] > most)
    }
    if config.partition.rule == "natural":
        out["dataset.train_samples"] = None  # whole writers
    if has["model.name"] == "mobilenetv3_ofa":
        out["model.width"] = 0.1
    if has["model.name"] == "mobilenetv2":
        out["model.width"] = 0.25  # with fewer channels half a network is too large for the weak devices
    return out | {path: least for path, least in AT_LEAST.items() if 0 < has[path] < least}


def test_every_large_suite_of_flexfl_has_a_small_twin() -> None:
    flexfl = {name for name in published_suites.names() if name.startswith("flexfl/")}
    assert {name for name in flexfl if f"{name}-small" not in flexfl} == {n for n in flexfl if n in SMALL}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_twin_runs(name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXFLEET_DATA", str(root))
    suite, read = published_suites.load(name), partial(load_config, None)
    given, _ = published_suites.entries_of(suite, None, "0", {}, read, "twin")
    for data in {entry.config.dataset.name for entry in given} & set(FILES):
        load, files = reader(data, root), ()
        monkeypatch.setitem(DATASETS, data, replace(DATASETS[data], load=load, files=files))
    sets: dict[str, Any] = {f"{e.label}:{path}": v for e in given for path, v in smaller(e.config).items()}
    # To choose a strategy takes longer than to train so little.
    sets |= {"rounds.stop": 2, "run.strategy": "single", "tracking.mlflow": None}
    runs, _ = published_suites.entries_of(suite, None, "0", sets, read, "twin")
    found = run_comparison(runs, "twin", to=suite.to, execute=one_by_one)
    assert set(found.results) == set(suite.made()) and found.rounds == 2
    table = Path("runs/twin/comparison.md").read_text().replace("**", "")  # Two labels are bold.
    assert all(f" {escaped(label)} |" in table for label in suite.made())
    if suite.to:
        assert [one.accuracy for one in next(iter(found.results.values())).reached] == sorted(suite.to)

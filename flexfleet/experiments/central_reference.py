"""Central trainings as the reference of a comparison. Those with other data or another network are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.data.local_data import LOCAL
from flexfleet.config import Config
from flexfleet.config.comparison_runs import Entry
from flexfleet.config.form import hand_over
from flexfleet.experiments.comparison_file import Central, Highest, Spread, spread
from flexfleet.experiments.executor import Command
from flexfleet.files import manifest
from flexfleet.files.artifacts import History, Result
from flexfleet.pipeline.central import CentralFile, deciding

log = logging.getLogger("flexfleet")

LABEL = "central"
"""The label of trainings that a suite asks for, as in `central-s0`."""
COMMON = ("dataset.", "model.")
"""The parameters that a central training must have in common with the runs that are compared with it."""


def read(
    folders: Sequence[Path],
    settings: Mapping[str, Any],
    varied: Sequence[str],
    data: Callable[[], Mapping[int, Collection[str]]] | None = None,
) -> Central:
    """The finished trainings in these folders, one for each seed. `settings`: the parameters of the runs, `varied`:
    those in which labels differ, `data` gives by seed the fingerprints of the runs' data. Raises ConfigError if a
    training has other data or another network, or differs from the others in more than the seed; IntegrityError if one
    is not finished. Where the seed draws samples, warns of a training with a seed that no run has."""
    if apart := [key for key in varied if key.startswith(COMMON)]:
        raise ConfigError(f"--central is one reference for all runs, but the labels differ in {', '.join(apart)}")
    if settings.get("partition.rule") == LOCAL:
        raise ConfigError(
            "--central is trained on all training samples, and with partition.rule=local they are the clients' own: "
            "leave out --central"
        )
    files, results = [], []
    for folder in folders:
        if not (folder / "central.json").is_file():
            raise ConfigError(f"{folder} is not the folder of a central training: it has no central.json")
        files.append(CentralFile.read(folder / "central.json"))
        manifest.check(folder)
        results.append(Result.read(folder / "result.json"))
    for folder, file in zip(folders, files, strict=True):
        wanted = {key: settings.get(key) for key in file.config if key.startswith(COMMON)}
        wanted |= {key: value for key, value in files[0].config.items() if key.startswith("central.")}
        changed = [f"{k}: {v!r}, not {file.config.get(k)!r}" for k, v in wanted.items() if file.config.get(k) != v]
        if changed:
            raise ConfigError(f"{folder} is no reference for these runs: expected {', '.join(changed[:4])}")
    seeds = tuple(int(file.config["seed"]) for file in files)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--central takes one training for each seed, got the seeds {', '.join(map(str, seeds))}")
    if data is not None:
        sums = data()  # last, since it reads the data
        for folder, file, seed in zip(folders, files, seeds, strict=True):
            _check_data(folder, file, sums.get(seed, ()), sums)
    best = [result.metrics["best"] for result in results]
    beside = [result.metrics.get("further", {}) for result in results]
    further = {name: spread([each.get(name, {}).get("full") for each in beside]) for name in beside[0]}
    return Central(
        seeds=seeds,
        settings={key: value for key, value in files[0].config.items() if key.startswith("central.")},
        full=_over(result.metrics["full"] for result in results),
        best=_over(each["full"] for each in best),
        best_epoch=_over(each["round"] for each in best),
        highest=tuple(
            Highest(
                share=int(share), avg=None, full=spread([each.metrics["highest"][share]["full"] for each in results])
            )
            for share in results[0].metrics["highest"]
        ),
        seconds=_over(result.seconds for result in results),
        further={name: each for name, each in further.items() if each is not None},
    )


def _check_data(folder: Path, file: CentralFile, of_seed: Collection[str], data: Mapping[int, Collection[str]]) -> None:
    """`of_seed`: of the runs with the training's seed; empty: there are none."""
    expected = [*(of_seed or chain.from_iterable(data.values()))]
    if file.data_sha256 in expected:
        return
    if not of_seed and (file.config.get("dataset.train_samples") or file.config.get("dataset.test_samples")):
        log.warning("%s: its seed, which no run has, drew other samples than the runs'", folder)
        return
    raise ConfigError(
        f"{folder} is no reference for these runs: it was trained on other data (sha256 {file.data_sha256[:12]}, "
        f"expected {expected[0][:12]}): the files or partition.seed were others; make it again with `flexfleet central`"
    )


def commands(entries: Sequence[Entry], folder: Path, options: Sequence[str], tags: Mapping[str, str]) -> list[Command]:
    """The commands for the trainings that are not finished, in subfolders of `folder`."""
    found = []
    for entry in entries:
        if finished(entry.config, folder / entry.name):
            continue
        config, stdin = hand_over(entry.config, folder / f"{entry.name}.yaml")
        argv = ["central", "--config", config, "--run-id", entry.name, "--resume", *options]
        argv += [word for key, value in tags.items() for word in ("--tag", f"{key}={value}")]
        found.append(Command(entry.name, "flexfleet.cli.main", tuple(argv), folder / f"{entry.name}.log", stdin))
    return found


def finished(config: Config, out: Path) -> bool:
    """Whether the folder holds a result of the configured training. One of another training is not finished:
    `flexfleet central --resume` says where they differ. Raises IntegrityError if a file of a finished one has
    changed."""
    if not manifest.check(out):
        return False
    try:
        Result.read(out / "result.json")
        epochs, known = len(History.read(out / "history.json").rounds), CentralFile.read(out / "central.json").config
        # An earlier version had fewer parameters: then it did as their defaults do.
        return epochs == config.central.epochs and deciding(Config()) | known == deciding(config)
    except IntegrityError:
        return False


def _over(values: Any) -> Spread:
    found = spread([float(value) for value in values])
    assert found is not None, "there is at least one training"
    return found

"""`flexfleet.run`: a run from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.samples import Data
from flexfleet.api.arguments import Default, check_kinds, config_of
from flexfleet.api.callbacks import Callback, run_watched
from flexfleet.api.errors import told
from flexfleet.api.results import Result
from flexfleet.config import Config

DATASET, MODEL, ALGORITHM = Default("digits"), Default("small_cnn"), Default("flexfl")


def run(
    dataset: str | Data = DATASET,
    model: Any = MODEL,
    algorithm: Any = ALGORITHM,
    *,
    rounds: int | None = None,
    clients: int | None = None,
    partition_rule: str | None = None,
    dirichlet_alpha: float | None = None,
    client_fraction: float | None = None,
    local_epochs: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    mlflow_uri: str | None = None,
    store_uri: str | None = None,
    options: Mapping[str, Any] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    run_id: str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Partitions the data, trains, evaluates and reports: what `flexfleet run` does, with the same bits.

    `dataset`: a name, or data (`from_arrays`, `from_folder`, ...). `model`: a name, a torch module's class, or a
    function that builds one. `algorithm`: a name, a class, or an object of one with its options. The keywords are the
    fields of the run form; `options` sets every other parameter by its dotted name, e.g. {"training.momentum": 0.9};
    `config` is a params.yaml, or its sections, below both. No file is read that is not named here. `store_uri`: the
    folder of all runs (default `runs`), or s3://bucket/prefix for their ledgers. `mlflow_uri`: default
    sqlite:///mlflow.db; options={"tracking.mlflow": None}: none.

    `resume`: go on with the run of this `run_id`. `progress`: a line for each round, in a notebook a bar; True shows
    lines in a notebook too, False shows neither. Warnings are logged by the logger `flexfleet` in each case.

    Raises ConfigError, DataError or another FlexfleetError for whatever is wrong, before anything trains where it can
    be known then. A run that a callback stops gives a result with the status `stopped`. A run that merged no update
    gives one with the status `diverged` or `nothing_merged`, and logs a warning; its model is of no use.
    """
    keywords = {
        "dataset": dataset,
        "model": model,
        "algorithm": algorithm,
        "rounds": rounds,
        "clients": clients,
        "partition_rule": partition_rule,
        "dirichlet_alpha": dirichlet_alpha,
        "client_fraction": client_fraction,
        "local_epochs": local_epochs,
        "learning_rate": learning_rate,
        "seed": seed,
        "mlflow_uri": mlflow_uri,
        "store_uri": store_uri,
    }
    __tracebackhide__ = True

    def go() -> Result:
        check_kinds(config, options)
        return run_watched(config_of(config, options, keywords), run_id, resume, callbacks, progress, Result)

    return told(go)

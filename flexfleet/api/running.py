"""`flexfleet.run`: a run from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.samples import Data
from flexfleet.api.arguments import Arguments
from flexfleet.api.callbacks import Callback, run_watched
from flexfleet.api.calls import told
from flexfleet.api.results import Result
from flexfleet.config import Config
from flexfleet.pipeline.prepare import Resolved


def run(
    dataset: str | Data | None = None,
    model: Any = None,
    algorithm: Any = None,
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
    """Partition the data, train, evaluate and report, as `flexfleet run` does, with the same bits.

    Only files that are named here are read. The keywords are the fields of the run form.

    Args:
        dataset: A name (default: digits), or data (`from_arrays`, `from_folder`, ...).
        model: A name (default: small_cnn), a torch module's class, or a function that builds one.
        algorithm: A name (default: flexfl), a class, or an object with its options.
        options: All other parameters by dotted name, e.g. {"training.momentum": 0.9}.
        config: A params.yaml, or its sections, below the keywords and options.
        store_uri: The folder of all runs (default: `runs`), or s3://bucket/prefix for their ledgers.
        mlflow_uri: Default: sqlite:///mlflow.db. Give options={"tracking.mlflow": None} for none.
        resume: Resume the run with this `run_id`.
        progress: None logs a line for each round, in a notebook shows a bar; True logs lines in a notebook too; False
            shows neither. The logger `flexfleet` logs warnings in each case.

    Returns:
        The result. A run that a callback stops has the status `stopped`. A run that merged no update has the status
        `diverged` or `nothing_merged` and logs a warning; its model is of no use.

    Raises:
        FlexfleetError: Something is wrong (ConfigError, DataError, ...), if possible before anything trains.

    Example:
        >>> result = flexfleet.run("digits", algorithm="heterofl", rounds=5)
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
        arguments = Arguments(config, options, keywords)
        resolved = Resolved(*arguments.load(arguments.overrides))
        return run_watched(resolved, run_id, resume, callbacks, progress, Result)

    return told(go)

"""Define `flexfleet.run`, which trains from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from fl_engine.core.samples import Data
from flexfleet.api.arguments import Arguments
from flexfleet.api.callbacks import Callback
from flexfleet.api.calls import api_call, run_watched
from flexfleet.api.results import Result
from flexfleet.config import Config
from flexfleet.config.dotted import SHORT
from flexfleet.pipeline.prepare import Resolved


@api_call
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
    progress: bool = True,
) -> Result:
    """Partition the data, train, evaluate and write a report. The command `flexfleet run` trains a bit-identical model.

    Args:
        dataset: A name (default: digits), or a data set from `from_arrays`, `from_folder` and so on.
        model: A name (default: small_cnn), a torch module class, or a function that returns a torch module.
        algorithm: A name (default: flexfl), a class, or an object with its options.
        rounds: Number of rounds.
        clients: Number of clients.
        partition_rule: Rule that divides the data among the clients: iid, dirichlet, natural, ...
        dirichlet_alpha: Concentration of the Dirichlet distribution. Smaller values make clients less similar.
        client_fraction: Fraction of the clients that train in each round.
        local_epochs: Number of local epochs of each client in a round.
        learning_rate: Learning rate of the clients.
        seed: Seed for all random decisions.
        mlflow_uri: MLflow's address (default: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db if this variable is not set).
            options={"tracking.mlflow": None} disables it.
        store_uri: Folder that contains all runs (default: `runs`), or s3://bucket/prefix for the ledgers of the runs.
        options: All other parameters by dotted name, e.g. {"training.momentum": 0.9}.
        config: Path of a params.yaml, or a mapping with its sections. Keywords and options override `config`.
        run_id: Name of the run's folder. If None, the name consists of the algorithm, the seed and the time.
        resume: True to resume the run with this `run_id`.
        callbacks: `Callback` objects.
        progress: True to log a line for each round. Warnings are always logged.

    Returns:
        The result. If the status is `diverged` or `nothing_merged`, the model is not usable.

    Raises:
        FlexfleetError: An argument, the data or the environment is wrong (ConfigError, DataError, ...). Most errors
            are raised before training starts.

    Examples:
        >>> result = flexfleet.run("digits", algorithm="heterofl", rounds=5)
    """
    given = locals()
    arguments = Arguments({name: given[name] for name in (*SHORT, "config", "options")})
    resolved = Resolved(*arguments.load(arguments.overrides))
    return run_watched(resolved, run_id, resume, callbacks, progress, Result)


class Common(TypedDict, total=False):
    """Arguments of `run` that `compare` and `tune` also accept."""

    dataset: str | Data | None
    model: Any
    rounds: int | None
    clients: int | None
    partition_rule: str | None
    dirichlet_alpha: float | None
    client_fraction: float | None
    local_epochs: int | None
    learning_rate: float | None
    mlflow_uri: str | None
    store_uri: str | None
    options: Mapping[str, Any] | None
    config: str | Path | Mapping[str, Any] | Config | None

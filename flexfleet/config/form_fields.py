"""What a run form shares with the command line and Python: short names, the platform's addresses, no passwords.

Nothing here imports the engine, so that commands which only read a form start quickly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from fl_engine.core.errors import ConfigError, holds_password, masked

SHORT: dict[str, str] = {
    "dataset": "dataset.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "clients": "partition.clients",
    "partition_rule": "partition.rule",
    "dirichlet_alpha": "partition.alpha",
    "rounds": "rounds.stop",
    "client_fraction": "training.fraction",
    "local_epochs": "training.epochs",
    "learning_rate": "training.lr",
    "seed": "seed",
    "mlflow_uri": "tracking.mlflow",
    "store_uri": "run.store",
}
"""Short names, and the dotted names of the parameters that they set. All other parameters have dotted names only. A
`store_uri` with a scheme (s3://bucket/prefix) sets run.remote instead; see `place`."""
STUDY: dict[str, str] = {"trials": "tune.trials"}
"""Short names that only a study has."""
LISTED = {name: SHORT[name] for name in ("dataset", "model", "algorithm")}
"""Fields that forms show as lists of the registered names. A user's own class is not in the list, so `advanced` may set
these parameters too, and its value replaces the field's."""
REMOTE = {"run.remote": "store_uri"}
"""What a `store_uri` with a scheme sets."""

_OF_MLFLOW = (
    "give the server's address alone, and MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN, as keys of the Secret flexfleet-mlflow (FLEXFLEET_MLFLOW_SECRET names another)"
)
INSTEAD = {
    "mlflow_uri": _OF_MLFLOW,
    "tracking.mlflow": _OF_MLFLOW,
    "dataset.root": "give the address without it, and let git ask its credential helper (`git help credentials`)",
    "tune.storage": "leave it out, and put the address into the Secret flexfleet-tune (FLEXFLEET_TUNE_SECRET names "
    "another) as FLEXFLEET_TUNE_STORAGE",
}
"""What to give instead of an address with a password."""


def place(name: str, value: object) -> str:
    """Return the dotted name that a short name sets to this value."""
    if name == "store_uri" and "://" in str(value):
        return "run.remote"
    return {**SHORT, **STUDY}[name]


def no_passwords(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a parameter holds a password: Kubeflow stores and shows parameters and the files that tasks
    make from them."""
    for name, value in given.items():
        if any(holds_password(text) for text in _texts(value)):
            instead = INSTEAD.get(name.rpartition(":")[2], "give the address without it")
            raise ConfigError(f"{name} holds a password, and Kubeflow shows parameters: {instead}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def platform_uri() -> str | None:
    """Return the tracking server that the task's environment names, without its password. Kubeflow's MLflow plugin sets
    it."""
    return masked(os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/") or None


def platform_store() -> str | None:
    """Return the store for runs that the task's environment names (s3://bucket/prefix): the key S3_STORE of the Secret
    with the S3 credentials."""
    return os.environ.get("FLEXFLEET_S3_STORE") or None

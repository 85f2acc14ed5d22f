"""The short names of common parameters, in one table for Kubeflow's form, the command line and Python."""

from __future__ import annotations

from collections.abc import Mapping

SHORT: Mapping[str, str] = {
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
"""Short names, and the dotted names of the parameters that they set. All other parameters have dotted names alone. A
`store_uri` with a scheme (s3://bucket/prefix) sets run.remote instead: see `place`."""

STUDY: Mapping[str, str] = {"trials": "tune.trials"}
"""What a study has too."""


LISTED = {name: SHORT[name] for name in ("dataset", "model", "algorithm")}
"""Fields that forms show as lists of the registered names, and the parameters that they set. The user's own classes are
not in the lists, so `advanced` may set these parameters too, and its value replaces the field's."""
REMOTE = {"run.remote": "store_uri"}
"""What a `store_uri` with a scheme sets."""


def place(name: str, value: object) -> str:
    """The dotted name that a short name sets to this value."""
    if name == "store_uri" and "://" in str(value):
        return "run.remote"
    return {**SHORT, **STUDY}[name]

"""Parameters of a pipeline must not hold a password, nor the one of a run that its files show. `flexfleet submit`
checks the former too, and needs no engine for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fl_engine.core.errors import ConfigError, holds_password

OF_MLFLOW = (
    "give the server's address alone, and MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN, as keys of the Secret flexfleet-mlflow (FLEXFLEET_MLFLOW_SECRET names another)"
)
INSTEAD = {
    "mlflow_uri": OF_MLFLOW,
    "tracking.mlflow": OF_MLFLOW,
    "dataset.root": "give the address without it, and let git ask its credential helper (`git help credentials`)",
    "tune.storage": "leave it out, and put the address into the Secret flexfleet-tune (FLEXFLEET_TUNE_SECRET names "
    "another) as FLEXFLEET_TUNE_STORAGE",
}
"""What to give instead of an address with a password."""


def no_passwords(given: Mapping[str, Any]) -> None:
    """Raises ConfigError if a parameter holds a password: Kubeflow stores and shows parameters, and the files that
    tasks make from them."""
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

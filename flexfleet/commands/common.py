"""What several commands share: the values of `--tag`, the need for a name, where MLflow is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fl_engine.core.errors import ConfigError, masked


def resumes_by_name(args: argparse.Namespace) -> None:
    """Raises ConfigError where `--resume` does not say which run."""
    if args.resume and args.run_id is None:
        raise ConfigError("--resume needs --run-id: the name of the run to go on with, a folder of the run store")


def tags_of(texts: Sequence[str], option: str = "--tag") -> dict[str, str]:
    """The values of a repeatable `key=value` option, by key. Raises ConfigError."""
    pairs = [text.partition("=") for text in texts]
    wrong = [text for text, (key, sign, _) in zip(texts, pairs, strict=True) if not key or not sign]
    if wrong:
        raise ConfigError(f"{option} takes key=value, got {wrong[0]!r}")
    return {key: value for key, _, value in pairs}


def where_tracked(uri: str, ui: str | None) -> str:
    """Where to see the run in MLflow: the server's address, or the command that starts a server for a database."""
    if ui is not None or uri.startswith(("http://", "https://")):
        return f"MLflow: {masked(ui or uri)}"
    return f"MLflow: mlflow ui --backend-store-uri {masked(uri)}"

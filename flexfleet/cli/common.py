"""What several commands share: the values of `--tag`, the need for a name, where MLflow is."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_engine.core.errors import ConfigError, masked

if TYPE_CHECKING:
    from flexfleet.config import Config

log = logging.getLogger("flexfleet")


def resumes_by_name(args: argparse.Namespace) -> None:
    """Raise ConfigError if `--resume` is given without the name of a run."""
    if args.resume and args.run_id is None:
        raise ConfigError("--resume needs --run-id: the name of the run to go on with, a folder of the run store")


def tell_if_new(config: Config, folder: Path, resume: bool) -> None:
    """Log that `--resume` finds no run and a new one begins. This is allowed, because a repeated task need not know
    whether it has begun."""
    if resume and config.run.remote is None and not folder.exists():
        log.info("--resume: there is no %s, so nothing goes on and a new run begins", folder)


def tags_of(texts: Sequence[str], option: str = "--tag") -> dict[str, str]:
    """Return the values of a repeatable `key=value` option, by key. Raises ConfigError."""
    pairs = [text.partition("=") for text in texts]
    wrong = [text for text, (key, sign, _) in zip(texts, pairs, strict=True) if not key or not sign]
    if wrong:
        raise ConfigError(f"{option} takes key=value, got {wrong[0]!r}")
    return {key: value for key, _, value in pairs}


def where_tracked(uri: str) -> str:
    """Return where to see the run in MLflow: the server's address, or the command that starts one for a database."""
    if uri.startswith(("http://", "https://")):
        return f"MLflow: {masked(uri)}"
    return f"MLflow: mlflow ui --backend-store-uri {masked(uri)}"

"""What a platform tells the tasks that it starts, by their environment."""

from __future__ import annotations

import os

from fl_engine.core.errors import masked


def platform_uri() -> str | None:
    """The tracking server of the environment, without a password: Kubeflow's MLflow plugin names it to tasks. None
    where the environment names none."""
    return masked(os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/") or None

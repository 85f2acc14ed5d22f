"""What a platform says in the environment of the tasks that it starts."""

from __future__ import annotations

import os

from fl_engine.core.errors import masked


def platform_uri() -> str | None:
    """The tracking server that the environment names, without its password; None if it names none. Kubeflow's MLflow
    plugin sets it in tasks."""
    return masked(os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/") or None


def platform_store() -> str | None:
    """The store for runs that the environment names, as s3://bucket/prefix; None if it names none. In tasks, the key
    S3_STORE of the Secret with the S3 credentials sets it."""
    return os.environ.get("FLEXFLEET_S3_STORE") or None

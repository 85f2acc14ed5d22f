"""What all pipelines share: how a function becomes a task, and the image that every task runs in."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from kfp import dsl, kubernetes

from fl_engine import PARAMETER_TABLE, __version__

DEFAULT_IMAGE = f"ghcr.io/flexfleet/flexfleet:{__version__}"

IMAGE = os.environ.get("FLEXFLEET_IMAGE", DEFAULT_IMAGE)
"""Chosen when a pipeline is compiled. Give a digest (`name@sha256:...`) where every task of every run is to have the
very same code."""

S3_SECRET = os.environ.get("FLEXFLEET_S3_SECRET", "flexfleet-s3")
"""Secret of the namespace that pipelines run in. Its keys are the variables that boto3 reads. Tasks have them with
FLEXFLEET_ in front: Kubeflow's launcher, in the same container, would take them for those of its own artifacts."""
S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
COORDINATOR_KEYS = (
    *S3_KEYS,
    *(f"{whose}_{key}" for whose in ("SIGNING", "SECRETS") for key in S3_KEYS[:3]),
    "SECRETS_AWS_ENDPOINT_URL",
    "S3_UNCHECKED",
)
"""For tasks that run rounds: what signs clients' URLs and what opens the bucket of the run's key, where that is another
pair than the task's own; and leave to use a server that does not check."""

MLFLOW_SECRET = os.environ.get("FLEXFLEET_MLFLOW_SECRET", "flexfleet-mlflow")
"""Secret of that namespace for an MLflow server that wants a password. Its keys are the variables that MLflow reads."""
MLFLOW_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

KUBEFLOW_UI = os.environ.get("FLEXFLEET_KUBEFLOW_UI")
"""Where people open Kubeflow Pipelines: MLflow's runs then have a link to the pipeline's run (`tracking.kubeflow`)."""

TUNE_SECRET = os.environ.get("FLEXFLEET_TUNE_SECRET", "flexfleet-tune")
"""Secret of that namespace with the address of a study's data base, password included, under the key TUNE_KEY."""
TUNE_KEY = "FLEXFLEET_TUNE_STORAGE"

DATA_CLAIM = os.environ.get("FLEXFLEET_DATA_CLAIM")
"""A volume claim of that namespace with the data sets in it; none: the digits, which the image holds."""

PARAMETERS = f"All parameters, for `advanced`: {PARAMETER_TABLE}"
"""At the end of each pipeline's description: the form shows names and defaults alone."""

NODE_SELECTOR = dict(pair.split("=", 1) for pair in os.environ.get("FLEXFLEET_TASK_NODES", "").split(",") if pair)
"""label=value, separated by commas: where tasks run (clients' pods have `kubernetes.pools`)."""

LOST = ("unreachable", "not-ready")
"""Taints of a node that is lost. Tasks give it a minute, not the five of every pod."""

# kfp has no types; naming them here keeps `ignore` comments out of the components, whose source kfp copies.
task: Callable[[Callable[..., Any]], Any] = dsl.component(base_image=IMAGE, install_kfp_package=False)
pipeline: Callable[..., Callable[[Callable[..., Any]], Any]] = dsl.pipeline


def on_cluster(*tasks: Any, retries: int = 3, keys: Sequence[str] = S3_KEYS) -> None:
    """What every task has there: the same image for the pods that it makes, S3's and MLflow's credentials as far as the
    Secrets have them, the data, its nodes, no long wait for one that is lost; and a new pod where one fails, with no
    answer from the cache."""
    for each in tasks:
        each.set_caching_options(False)
        if retries:
            each.set_retry(num_retries=retries, backoff_duration="30s", backoff_factor=2)
        each.set_env_variable("FLEXFLEET_IMAGE", IMAGE)
        kubernetes.use_secret_as_env(each, S3_SECRET, {key: f"FLEXFLEET_{key}" for key in keys}, optional=True)
        kubernetes.use_secret_as_env(each, MLFLOW_SECRET, {key: key for key in MLFLOW_KEYS}, optional=True)
        if KUBEFLOW_UI:
            each.set_env_variable("FLEXFLEET_KUBEFLOW_UI", KUBEFLOW_UI)
        kubernetes.set_image_pull_policy(each, "IfNotPresent")
        if DATA_CLAIM:
            kubernetes.mount_pvc(each, pvc_name=DATA_CLAIM, mount_path="/data")
            each.set_env_variable("FLEXFLEET_DATA", "/data")
        for what in LOST:
            key = f"node.kubernetes.io/{what}"
            kubernetes.add_toleration(each, key, "Exists", effect="NoExecute", toleration_seconds=60)
        for label, value in NODE_SELECTOR.items():
            kubernetes.add_node_selector(each, label, value)

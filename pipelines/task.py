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

WEBHOOK_SECRET = os.environ.get("FLEXFLEET_WEBHOOK_SECRET", "flexfleet-webhook")
"""Secret of that namespace with the address that a failed night calls, under the key WEBHOOK_KEY."""
WEBHOOK_KEY = "FLEXFLEET_WEBHOOK"

DATA_CLAIM = os.environ.get("FLEXFLEET_DATA_CLAIM")
"""A volume claim of that namespace with the data sets in it; none: the digits, which the image holds."""

ALGORITHMS = (
    "adaptivefl, all_large, decoupled, depthfl, federated_dropout, fedopt, fedprox, fedrolex, fjord, flexfl, heterofl, "
    "scalefl"
)
DATASETS = "cifar10, digits, fashion_mnist"
NETWORKS = "mobilenetv2, preresnet18, resnet18, resnet34, small_cnn, vgg16"
"""Named here, since compiling imports no torch; a test holds them against the registries."""


def described(what: str, first: str, example: str = '{"algorithm.kd_weight": 5, "rounds.evaluate_every": 5}') -> str:
    """A pipeline's description, which the form shows above its fields; of those it shows names and defaults alone.
    `first` is what a newcomer changes before anything else."""
    return (
        f"{what} Change first: {first}. Algorithms: {ALGORITHMS}. Data sets: {DATASETS}. Networks: {NETWORKS}. "
        "Your own: package.module:NAME. Everything else goes into `advanced`, as one JSON object of dotted names: "
        f"{example}. All of them: {PARAMETER_TABLE}"
    )


TASK_CPU = os.environ.get("FLEXFLEET_TASK_CPU", "250m:2")
TASK_MEMORY = os.environ.get("FLEXFLEET_TASK_MEMORY", "1Gi:4Gi")
TRAIN_CPU = os.environ.get("FLEXFLEET_TRAIN_CPU", "500m:8")
TRAIN_MEMORY = os.environ.get("FLEXFLEET_TRAIN_MEMORY", "1Gi:16Gi")
"""request:limit, chosen when a pipeline is compiled; TRAIN for tasks in which networks are trained."""
TRAIN_GPU = os.environ.get("FLEXFLEET_TRAIN_GPU", "")
"""kind=number (nvidia.com/gpu=1): accelerators of each task that trains; none where it is empty."""

NODE_SELECTOR = dict(pair.split("=", 1) for pair in os.environ.get("FLEXFLEET_TASK_NODES", "").split(",") if pair)
"""label=value, separated by commas: where tasks run (clients' pods have `kubernetes.pools`)."""

LOST = ("unreachable", "not-ready")
"""Taints of a node that is lost. Tasks give it a minute, not the five of every pod."""

# kfp has no types; naming them here keeps `ignore` comments out of the components, whose source kfp copies.
task: Callable[[Callable[..., Any]], Any] = dsl.component(base_image=IMAGE, install_kfp_package=False)
pipeline: Callable[..., Callable[[Callable[..., Any]], Any]] = dsl.pipeline


def on_cluster(*tasks: Any, retries: int = 3, keys: Sequence[str] = S3_KEYS, trains: bool = False) -> None:
    """What every task has there: the same image for the pods that it makes, S3's and MLflow's credentials as far as the
    Secrets have them, the data, its nodes, no long wait for one that is lost, its share of them, and no root, which
    namespaces that enforce `restricted` want said. And a new pod where Kubeflow's version makes one (see the guide),
    with no answer from the cache."""
    for each in tasks:
        each.set_caching_options(False)
        _sized(each, TRAIN_CPU if trains else TASK_CPU, TRAIN_MEMORY if trains else TASK_MEMORY)
        if trains and TRAIN_GPU:
            kind, _, number = TRAIN_GPU.partition("=")
            each.set_accelerator_type(kind).set_accelerator_limit(int(number or 1))
        kubernetes.set_security_context(each, run_as_non_root=True)
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


def _sized(task: Any, cpu: str, memory: str) -> None:
    for given, request, limit in (
        (cpu, task.set_cpu_request, task.set_cpu_limit),
        (memory, task.set_memory_request, task.set_memory_limit),
    ):
        least, _, most = given.partition(":")
        request(least)
        limit(most or least)

"""What all pipelines share: the description of their forms, and the settings of every task on the cluster."""

from collections.abc import Callable, Sequence
from typing import Any

from kfp import dsl, kubernetes

from fl_engine import PARAMETER_TABLE
from flexfleet.kubeflow.retarget import DEFAULT_IMAGE, SECRETS, SIZES

S3_SECRET = SECRETS["FLEXFLEET_S3_SECRET"]
"""Its keys are the variables that boto3 reads, and S3_STORE, the store for forms whose `store_uri` is empty. In tasks
their names start with FLEXFLEET_: else Kubeflow's launcher, in the same container, would use them for its own
artifacts."""
S3_KEYS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION",
    "S3_STORE",
)  # fmt: skip
COORDINATOR_KEYS = (
    *S3_KEYS,
    *(f"{whose}_{key}" for whose in ("SIGNING", "SECRETS") for key in S3_KEYS[:3]),
    "SECRETS_AWS_ENDPOINT_URL",
    "S3_UNCHECKED",
)
"""For tasks that run rounds: the credentials that sign clients' URLs and those of the bucket with the run's key, if
they are not the task's own; and the permission to use a server that does not check."""

MLFLOW_SECRET = SECRETS["FLEXFLEET_MLFLOW_SECRET"]
"""For an MLflow server that asks for a password. Its keys are the variables that MLflow reads."""
MLFLOW_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

TUNE_SECRET, TUNE_KEY = SECRETS["FLEXFLEET_TUNE_SECRET"], "FLEXFLEET_TUNE_STORAGE"
"""The address of a study's database, password included."""

WEBHOOK_SECRET, WEBHOOK_KEY = SECRETS["FLEXFLEET_WEBHOOK_SECRET"], "FLEXFLEET_WEBHOOK"
"""Address that a task of the nightly pipeline calls if the task fails or the gate fails."""


def described(
    what: str,
    first: str,
    example: str = '{"algorithm.kd_weight": 5, "rounds.evaluate_every": 5}',
    own: str = "algorithm.name",
) -> str:
    """Return a pipeline's description. The form shows it above the fields; of a field it shows only the name, the
    default and the list of choices. `first` names the fields that a newcomer should change first, `own` a parameter
    that takes the user's own class in place of a field's choices; empty: the form has no such field."""
    text = (
        f"{what} Change first: {first}. Everything else goes into `advanced`, as one JSON object of dotted names: "
        f"{example}. "
    )
    if own:
        text += f'A class of your own goes there too: {{"{own}": "package.module:NAME"}}. '
    return f"{text}All parameters: {PARAMETER_TABLE}"


LOST = ("unreachable", "not-ready")
"""Taints of a lost node. Tasks tolerate them for a minute, not for the default five."""

# kfp has no type hints. This annotation saves each graph a `type: ignore`.
pipeline: Callable[..., Callable[[Callable[..., Any]], Any]] = dsl.pipeline


def on_cluster(*tasks: Any, retries: int = 3, keys: Sequence[str] = S3_KEYS, trains: bool = False) -> None:
    """Sets for every task: its image, also for the pods that it makes; the credentials of S3 (`keys`) and MLflow from
    their Secrets; a short wait for a lost node; its CPU and memory; and a user other than root, which namespaces that
    enforce `restricted` require. Also sets retries with a new pod, if Kubeflow's version makes them (see the guide),
    and no cache. `retarget` sets what differs between clusters."""
    for each in tasks:
        each.set_caching_options(False)
        size = SIZES["TRAIN" if trains else "TASK"]
        for amount, request, limit in (
            (size["CPU"], each.set_cpu_request, each.set_cpu_limit),
            (size["MEMORY"], each.set_memory_request, each.set_memory_limit),
        ):
            least, _, most = amount.partition(":")
            request(least)
            limit(most)
        kubernetes.set_security_context(each, run_as_non_root=True)
        if retries:
            each.set_retry(num_retries=retries, backoff_duration="30s", backoff_factor=2)
        each.set_env_variable("FLEXFLEET_IMAGE", DEFAULT_IMAGE)
        kubernetes.use_secret_as_env(each, S3_SECRET, {key: f"FLEXFLEET_{key}" for key in keys}, optional=True)
        kubernetes.use_secret_as_env(each, MLFLOW_SECRET, {key: key for key in MLFLOW_KEYS}, optional=True)
        kubernetes.set_image_pull_policy(each, "IfNotPresent")
        for what in LOST:
            key = f"node.kubernetes.io/{what}"
            kubernetes.add_toleration(each, key, "Exists", effect="NoExecute", toleration_seconds=60)

"""Describe the forms of all pipelines, and set resources and credentials of their tasks."""

from collections.abc import Callable, Sequence
from typing import Any

from kfp import dsl, kubernetes

from fl_engine import PARAMETER_TABLE
from flexfleet.kubeflow.retarget import DEFAULT_IMAGE, SECRETS, SIZES

S3_SECRET = SECRETS["FLEXFLEET_S3_SECRET"]
"""Secret with the variables that boto3 reads, and S3_STORE, the default for an empty `store_uri`. In tasks, the names
start with FLEXFLEET_, because Kubeflow's launcher uses AWS_* in the same container for its own artifacts."""
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
"""Keys for tasks that run rounds. The additional credentials are for signing clients' URLs, and for the bucket with the
run's key. S3_UNCHECKED permits a server that does not enforce signatures."""

COORDINATOR = "app.kubernetes.io/name", "flexfleet-coordinator"
"""Label of the pods of tasks that run rounds, by which Prometheus finds them (k8s/components/monitoring)."""

MLFLOW_SECRET = SECRETS["FLEXFLEET_MLFLOW_SECRET"]
"""Secret with the variables from which MLflow reads its credentials."""
MLFLOW_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

TUNE_SECRET, TUNE_KEY = SECRETS["FLEXFLEET_TUNE_SECRET"], "FLEXFLEET_TUNE_STORAGE"
"""Secret and key for the address of a study's database, including the password."""

WEBHOOK_SECRET, WEBHOOK_KEY = SECRETS["FLEXFLEET_WEBHOOK_SECRET"], "FLEXFLEET_WEBHOOK"
"""Secret and key for the webhook that nightly tasks call if a task or the gate fails."""


def described(
    what: str,
    first: str,
    example: str = '{"algorithm.kd_weight": 5, "rounds.evaluate_every": 5}',
    own: str = "algorithm.name",
) -> str:
    """Return a pipeline's description, which the form shows above the fields. `first` names the fields to change
    first. `own` names a parameter for the user's own class; empty if the form does not have one."""
    text = (
        f"{what} Change first: {first}. Everything else goes into `advanced`, as one JSON object of dotted names: "
        f"{example}. "
    )
    if own:
        text += f'A class of your own goes there too: {{"{own}": "package.module:NAME"}}. '
    return f"{text}All parameters: {PARAMETER_TABLE}"


LOST = ("unreachable", "not-ready")
"""Taints of a lost node. Tasks tolerate these taints for one minute; the default in Kubernetes is five minutes."""

# kfp is not typed. Without this annotation, each pipeline function would need a `type: ignore`.
pipeline: Callable[..., Callable[[Callable[..., Any]], Any]] = dsl.pipeline


def on_cluster(*tasks: Any, retries: int = 3, keys: Sequence[str] = S3_KEYS, trains: bool = False) -> None:
    """Set the image (also for clients' pods), CPU, memory, and credentials for S3 (`keys`) and MLflow of every task.

    The tasks also get a short toleration of lost nodes, a non-root user (required by the Pod Security Standard
    `restricted`), no cache, and retries with a new pod. `retarget` sets the values that differ between clusters."""
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
        if keys is COORDINATOR_KEYS:
            kubernetes.add_pod_label(each, *COORDINATOR)
        for what in LOST:
            key = f"node.kubernetes.io/{what}"
            kubernetes.add_toleration(each, key, "Exists", effect="NoExecute", toleration_seconds=60)

"""What the suite does with a Kubeflow: follow runs, terminate them, try them again; find a task's pods, delete one,
kill the process in one; read artifacts."""

from __future__ import annotations

import hashlib
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import mlflow.artifacts
import urllib3
import websocket

from fl_engine.remote.kubernetes.cluster import Cluster, _connect
from flexfleet.config.form import PARAMETERS, config_from
from flexfleet.experiments import nightly, nightly_suite
from flexfleet.kubeflow.client import connected, pages, without_links
from flexfleet.kubeflow.follow import Followed, follow, terminate
from flexfleet.kubeflow.progress import rounds_of
from flexfleet.kubeflow.submit import checked, upload
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain

T = TypeVar("T")
Pod = dict[str, Any]

RUN = "pipeline/runid"
"""Kubeflow's label of all pods of a run."""
WORKFLOW = "workflows.argoproj.io/workflow"
"""Argo's."""
NODE = "workflows.argoproj.io/node-name"
"""Argo's annotation: the path of a pod's step, e.g. train-x7k2p(0).root(0).federate(0).executor(0) in 2.17."""
KILL = """
import os, signal, sys
own, killed = b"KFP_POD_NAME=" + os.environ["KFP_POD_NAME"].encode(), []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\\0")
        with open(f"/proc/{pid}/environ", "rb") as file:
            same = own in file.read().split(b"\\0")
        if same and b"kfp.dsl.executor_main" in words and b"python" in words[0]:
            os.kill(int(pid), signal.SIGKILL)
            killed.append(pid)
    except OSError:
        continue
sys.exit(0 if killed else 1)
"""
"""Kills the Python that is a task, not the launcher that started it, whose words say the same."""


SHORT: dict[str, Any] = {
    "clients": 6,
    "client_fraction": 0.5,
    "local_epochs": 1,
    "rounds": 3,
    "advanced": {
        "dataset.train_samples": 240,
        "dataset.test_samples": 60,
        "partition.minimum": 5,
        "partition.proxy": 0.1,
        "pretrain.epochs": 1,
        "model.width": 0.5,
    },
}


@dataclass(frozen=True)
class Place:
    """A Kubeflow and what its tasks are told."""

    host: str
    cluster: Cluster
    """The tasks' namespace."""
    store: str
    mlflow: str
    name: str
    """Of this run of the suite."""

    def parameters(self, name: str, key: str = "run_id", **more: Any) -> dict[str, Any]:
        """A short job on the digits, of that name."""
        return {**SHORT, "store_uri": self.store, key: f"{self.name}-{name}", **more}


# ------------------------------------------------------------------------------------------------------ runs
def ended(host: str, run_id: str, retries: int = 0) -> Followed:
    """Follow a run to its end, as `flexfleet submit --wait` does."""
    return follow(run_id, host=host, retries=retries)


def fired(host: str, recurring_run_id: str) -> list[str]:
    """The runs that a recurring run has made."""
    with connected(host) as client:
        job = client.get_recurring_run(recurring_run_id)
        listed = pages(client.list_runs, "runs", experiment_id=job.experiment_id)
        return [run.run_id for run in listed if run.recurring_run_id == recurring_run_id]


def disable(host: str, recurring_run_id: str) -> None:
    with connected(host) as client:
        client.disable_recurring_run(recurring_run_id)


def forget(host: str, recurring_run_id: str) -> None:
    """Delete a recurring run, and with it the Workflows of its runs."""
    with connected(host) as client:
        client.delete_recurring_run(recurring_run_id)


def started_unchecked(place: Place, parameters: dict[str, Any]) -> str:
    """Start `train` without the checks of `submit`, as Kubeflow's UI does; return the run's id."""
    with connected(place.host) as client, without_links():
        text, version = checked("train", {"store_uri": place.store})
        pipeline_id, version_id, _ = upload(client, "train", version, text, None)
        where = client.create_experiment(place.name).experiment_id
        run = client.run_pipeline(where, "unchecked", params=parameters, pipeline_id=pipeline_id, version_id=version_id)
    return str(run.run_id)


def end(host: str, run_id: str) -> None:
    with connected(host) as client:
        terminate(client, run_id)


def first_round(parameters: dict[str, Any], run_id: str, seconds: float = 600) -> None:
    """Waits until a round is committed, where ledgers or MLflow can be read from here."""
    look = rounds_of(parameters, run_id, print)
    if look is not None:
        when(look, seconds, "the first round")


def when(condition: Callable[[], T], seconds: float, what: str) -> T:
    """What a condition gives as soon as it holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not after {seconds:.0f} s")
        time.sleep(0.5)
    return found


# ------------------------------------------------------------------------------------------------------ pods
def pods_of(cluster: Cluster, run_id: str, task: str, phase: str | None = None) -> list[Pod]:
    """The pods that are a task of a run, its drivers not among them; several in a loop, or where one was replaced."""
    found = [pod for pod in cluster.select("pods", {RUN: run_id}) if task_of(pod) == task]
    return [pod for pod in found if phase is None or pod["status"].get("phase") == phase]


def task_of(pod: Pod) -> str:
    """The task that a pod executes; empty for a driver's."""
    assert WORKFLOW in pod["metadata"]["labels"], f"{pod['metadata']['name']} is no pod of Argo's"
    *_, task, step = ["", "", *pod["metadata"].get("annotations", {}).get(NODE, "").split(".")]
    return task.partition("(")[0] if step.partition("(")[0] == "executor" else ""


def running(cluster: Cluster, run_id: str, task: str, seconds: float = 600) -> Pod:
    """A pod of a task, as soon as one runs."""
    return when(lambda: pods_of(cluster, run_id, task, "Running"), seconds, f"a pod of {task} runs")[0]


def kill_process(cluster: Cluster, pod: Pod, seconds: float = 120) -> None:
    """SIGKILL to the Python in a pod, as soon as it has begun; the pod itself is not touched."""
    name = pod["metadata"]["name"]
    when(lambda: run_in(cluster, name, ["python3", "-c", KILL]) == 0, seconds, f"the process of {name} is killed")


def run_in(cluster: Cluster, pod: str, words: list[str]) -> int:
    """The exit code of a command in a pod's container `main` (pods/exec)."""
    config = _connect().configuration
    token = config.get_api_key_with_prefix("authorization")
    query = [("container", "main"), ("stdout", "1"), ("stderr", "1"), *(("command", word) for word in words)]
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/exec?{urlencode(query)}"
    url = config.host.rstrip("/").replace("http", "ws", 1) + path
    trust = {"ca_certs": config.ssl_ca_cert, "certfile": config.cert_file, "keyfile": config.key_file,
             "cert_reqs": ssl.CERT_REQUIRED if config.verify_ssl else ssl.CERT_NONE}  # fmt: skip
    socket = websocket.create_connection(
        url,
        timeout=60,
        header=[f"Authorization: {token}"] if token else [],
        subprotocols=["v4.channel.k8s.io"],
        sslopt={key: value for key, value in trust.items() if value is not None},
    )
    try:
        while True:
            message = socket.recv()
            data = message.encode() if isinstance(message, str) else message
            if not data:
                raise ConnectionError(f"{pod}: the connection ended before the command did")
            if data[0] == 3:  # channel 3 tells how it ended
                status = json.loads(data[1:])
                causes = status.get("details", {}).get("causes", [])
                codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
                assert codes or status["status"] == "Success", status
                return codes[0] if codes else 0
    finally:
        socket.close()


# -------------------------------------------------------------------------------------------------- artifacts
def uris_of(pod: Pod) -> dict[str, str]:
    """Where Kubeflow's launcher puts the artifacts of a task, as the driver has told it in the pod's command."""
    (main,) = (each for each in pod["spec"]["containers"] if each["name"] == "main")
    words = [*main.get("command", []), *main.get("args", [])]
    told = json.loads(words[words.index("--executor_input") + 1])
    outputs = told.get("outputs", {}).get("artifacts", {})
    return {name: listed["artifacts"][0]["uri"] for name, listed in outputs.items()}


def artifact(host: str, namespace: str, uri: str) -> bytes:
    """A file of Kubeflow's artifact store, as its UI gives it out."""
    source, rest = urlsplit(uri).scheme, uri.partition("://")[2]
    bucket, _, key = rest.partition("/")
    query = urlencode({"source": source, "namespace": namespace, "bucket": bucket, "key": key})
    answer = urllib3.request("GET", f"{host.rstrip('/')}/artifacts/get?{query}", timeout=60)
    assert answer.status == 200, (uri, answer.status, answer.data[:300])
    return answer.data


def output(host: str, cluster: Cluster, run_id: str, task: str, name: str, file: str = "") -> bytes:
    """An output of a task of a run, of its last pod; `file`: of one that is a folder."""
    pod = max(pods_of(cluster, run_id, task), key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    return artifact(host, cluster.namespace, uris_of(pod)[name] + (f"/{file}" if file else ""))


def model_sha256(host: str, cluster: Cluster, run_id: str, task: str = "federate", name: str = "run") -> str:
    return hashlib.sha256(output(host, cluster, run_id, task, name, "model.safetensors")).hexdigest()


def expected_sha256(parameters: dict[str, Any], out: Path) -> str:
    """Of the model that one process makes here without an interruption, of the same parameters."""
    given = {name: value for name, value in parameters.items() if name in PARAMETERS}
    here = {**given, "mlflow_uri": "", "store_uri": str(out / "runs")}
    resolved = Resolved.of(config_from(here, parameters.get("advanced", {})))
    partition(resolved, out / "partition")
    pretrain(resolved, out / "partition", out / "pretrain")
    model_pool(resolved, out / "pretrain", out / "pool")
    federate(resolved, out / "partition", out / "pool", out / "run")
    return hashlib.sha256((out / "run" / "model.safetensors").read_bytes()).hexdigest()


def figures_of(run_id: str, uri: str) -> dict[str, Any]:
    """A night's figures.json, from MLflow."""
    with tempfile.TemporaryDirectory() as scratch:
        at = mlflow.artifacts.download_artifacts(
            run_id=run_id, artifact_path="figures.json", dst_path=scratch, tracking_uri=uri
        )
        found: dict[str, Any] = json.loads(Path(at).read_text())
    return found


@contextmanager
def passed_raised(uri: str, by: float) -> Iterator[None]:
    """Raise the accuracies of the last nightly regression run that passed, so that the next one fails; restore them
    afterwards."""
    client = mlflow.MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    passed, newest = f"tags.`{nightly.PASSED}` = 'True'", ["attributes.start_time DESC"]
    (run,) = client.search_runs(experiments, passed, max_results=1, order_by=newest)
    run_id = run.info.run_id
    before = figures_of(run_id, uri)
    raised = json.loads(json.dumps(before))
    for label in raised["labels"].values():
        for metric in label["values"].keys() & {"avg", "full"}:  # an algorithm with one level has no avg
            label["values"][metric] = [value + by for value in label["values"][metric]]
    nightly_suite.NightFigures.model_validate(raised)
    client.log_dict(run_id, raised, "figures.json")
    try:
        yield
    finally:
        client.log_dict(run_id, before, "figures.json")

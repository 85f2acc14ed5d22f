"""Follow and end runs on a real Kubeflow; find pods of a task and kill their processes; read artifacts."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import mlflow
import urllib3
from kubernetes import client
from kubernetes.stream import stream

from fl_engine.remote.kubernetes.cluster import Cluster, _connect
from flexfleet.config import dotted
from flexfleet.config.form import config_from
from flexfleet.experiments import nightly, nightly_gate
from flexfleet.kubeflow.client import connected, pages, without_links
from flexfleet.kubeflow.follow import Followed, follow, rounds_of
from flexfleet.kubeflow.submit import Scheduled, checked, schedule, submit, upload
from flexfleet.pipeline.prepare import Resolved
from tests.harness.prepared import model_of, prepare

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
    """A Kubeflow, and the settings of its tasks."""

    host: str
    cluster: Cluster
    """The tasks' namespace."""
    store: str
    mlflow: str
    name: str
    """Of this run of the suite."""

    def parameters(self, name: str, key: str = "run_id", **more: Any) -> dict[str, Any]:
        """Return the form of a short job on the digits, of that name."""
        return {**SHORT, "store_uri": self.store, key: f"{self.name}-{name}", **more}

    # -------------------------------------------------------------------------------------------------- runs
    def start(self, pipeline: str, parameters: dict[str, Any]) -> str:
        return submit(pipeline, parameters, host=self.host, experiment=self.name).run_id

    def start_unchecked(self, parameters: dict[str, Any]) -> str:
        """Start `train` without the checks of `submit`, as Kubeflow's UI does, and return the run's ID."""
        with connected(self.host) as kubeflow, without_links():
            text, version, _ = checked("train", {"store_uri": self.store})
            ids, _ = upload(kubeflow, "train", version, text, None)
            where = kubeflow.create_experiment(self.name).experiment_id
            run = kubeflow.run_pipeline(where, "unchecked", params=parameters, **ids)
        return str(run.run_id)

    def ended(self, run_id: str, retries: int = 0) -> Followed:
        """Follow a run to its end, as `flexfleet submit --wait` does."""
        return follow(run_id, host=self.host, retries=retries)

    def finish(self, pipeline: str, parameters: dict[str, Any]) -> str:
        """Start a run, which must succeed, and return its ID."""
        run_id = self.start(pipeline, parameters)
        found = self.ended(run_id)
        assert found.exit_code == 0, found.error
        return run_id

    def terminate(self, run_id: str) -> None:
        with connected(self.host) as kubeflow:
            kubeflow.terminate_run(run_id)

    def schedule(self, parameters: dict[str, Any], name: str, cron: str) -> Scheduled:
        """Schedule `train` without a run's name."""
        given = {key: value for key, value in parameters.items() if key != "run_id"}
        return schedule("train", given, name, cron, host=self.host, experiment=self.name)

    def fired(self, recurring_run_id: str) -> str:
        """Return the first run that a recurring run starts, as soon as it exists."""

        def look() -> list[str]:
            with connected(self.host) as kubeflow:
                job = kubeflow.get_recurring_run(recurring_run_id)
                listed = pages(kubeflow.list_runs, "runs", experiment_id=job.experiment_id)
                return [run.run_id for run in listed if run.recurring_run_id == recurring_run_id]

        return when(look, 300, "a recurring run fires")[0]

    # -------------------------------------------------------------------------------------------------- pods
    def pods_of(self, run_id: str, task: str, phase: str | None = None) -> list[Pod]:
        """Return the pods that execute a task of a run: several in a loop, or if one was replaced. Drivers are not
        among them."""
        found = [pod for pod in self.cluster.select("pods", {RUN: run_id}) if task_of(pod) == task]
        return [pod for pod in found if phase is None or pod["status"].get("phase") == phase]

    def running(self, run_id: str, task: str) -> Pod:
        """Return a pod of a task, as soon as one runs."""
        return when(lambda: self.pods_of(run_id, task, "Running"), 600, f"a pod of {task} runs")[0]

    def kill_process(self, pod: Pod) -> None:
        """Kill the Python in a pod, as soon as it has begun. The pod itself is not touched."""
        name = pod["metadata"]["name"]
        when(lambda: self.execute(name, ["python3", "-c", KILL]) == 0, 120, f"the process of {name} is killed")

    def execute(self, pod: str, words: list[str]) -> int:
        """Return the exit code of a command in a pod's container `main` (pods/exec)."""
        ask = client.CoreV1Api(_connect()).connect_get_namespaced_pod_exec
        given = {"container": "main", "command": words, "stdout": True, "stderr": True}
        command = stream(ask, pod, self.cluster.namespace, **given, _preload_content=False)
        command.run_forever(timeout=60)
        code = command.returncode
        if code is None:
            raise TimeoutError(f"{pod}: the command has not ended after 60 s")
        return int(code)

    # --------------------------------------------------------------------------------------------- artifacts
    def output(self, run_id: str, task: str, name: str, file: str = "") -> bytes:
        """Return an output of a task's last pod, as Kubeflow's UI serves it. `file`: a file of an output that is a
        folder."""
        pod = max(self.pods_of(run_id, task), key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        uri = uris_of(pod)[name] + (f"/{file}" if file else "")
        where = urlsplit(uri)
        query = {"source": where.scheme, "namespace": self.cluster.namespace, "bucket": where.netloc}
        query["key"] = where.path.removeprefix("/")
        answer = urllib3.request("GET", f"{self.host.rstrip('/')}/artifacts/get?{urlencode(query)}", timeout=60)
        assert answer.status == 200, (uri, answer.status, answer.data[:300])
        return answer.data

    def model_sha256(self, run_id: str, task: str = "federate", name: str = "run") -> str:
        return hashlib.sha256(self.output(run_id, task, name, "model.safetensors")).hexdigest()


def first_round(parameters: dict[str, Any], run_id: str) -> None:
    """Wait until a round is committed, if ledgers or MLflow can be read from here."""
    look = rounds_of(parameters, run_id, print)
    if look is not None:
        when(look, 600, "the first round")


def when(condition: Callable[[], T], seconds: float, what: str) -> T:
    """Return what a condition gives as soon as it holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not after {seconds:.0f} s")
        time.sleep(0.5)
    return found


def task_of(pod: Pod) -> str:
    """Return the task that a pod executes; empty for a driver."""
    assert WORKFLOW in pod["metadata"]["labels"], f"{pod['metadata']['name']} is not a pod of Argo"
    task, step = f"..{pod['metadata'].get('annotations', {}).get(NODE, '')}".split(".")[-2:]
    return task.partition("(")[0] if step.partition("(")[0] == "executor" else ""


def uris_of(pod: Pod) -> dict[str, str]:
    """Map the artifacts of a task to their addresses, which the driver has written into the pod's command."""
    (main,) = (each for each in pod["spec"]["containers"] if each["name"] == "main")
    words = [*main.get("command", []), *main.get("args", [])]
    told = json.loads(words[words.index("--executor_input") + 1])
    outputs = told.get("outputs", {}).get("artifacts", {})
    return {name: listed["artifacts"][0]["uri"] for name, listed in outputs.items()}


def expected_sha256(parameters: dict[str, Any], out: Path) -> str:
    """Return the sha256 of the model that one process here trains from the same parameters without interruption."""
    given = {name: value for name, value in parameters.items() if name in dotted.SHORT}
    here = {**given, "mlflow_uri": "", "store_uri": str(out / "runs")}
    resolved = Resolved.of(config_from(here, parameters.get("advanced", {})))
    return hashlib.sha256(model_of(resolved, prepare(resolved, out), out / "run")).hexdigest()


@contextmanager
def passed_raised(uri: str, by: float) -> Iterator[None]:
    """Raise the accuracies of the last nightly regression run that passed, so that the next one fails; restore them
    afterwards."""
    server = mlflow.MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in server.search_experiments()]
    passed, newest = f"tags.`{nightly.PASSED}` = 'True'", ["attributes.start_time DESC"]
    (run,) = server.search_runs(experiments, passed, max_results=1, order_by=newest)
    run_id = run.info.run_id
    with tempfile.TemporaryDirectory() as scratch:
        before = json.loads(Path(server.download_artifacts(run_id, "figures.json", scratch)).read_text())
    raised = json.loads(json.dumps(before))
    for label in raised["labels"].values():
        for metric in ("avg", "full"):
            label["values"][metric] = [value + by for value in label["values"][metric]]
    nightly_gate.NightlyFigures.model_validate(raised)
    server.log_dict(run_id, raised, "figures.json")
    try:
        yield
    finally:
        server.log_dict(run_id, before, "figures.json")

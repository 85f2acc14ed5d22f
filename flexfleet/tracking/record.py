"""Create MLflow runs, and log their names, parents, data, code and environment.

Each flexfleet run has one MLflow run. A comparison, nightly regression run or study also has an MLflow run, which is
the parent of its runs' MLflow runs. If Kubeflow provides MLflow, the MLflow run of the pipeline is the parent of all
runs. If a Python program has an active MLflow run, this run is the parent of the runs that the program starts."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import fl_engine
from fl_engine.core.errors import ConfigError, masked
from fl_engine.datasets import stored_data
from fl_engine.storage.store import FolderStore, Store, sha256
from flexfleet.config import Config
from flexfleet.files.artifacts import RunFile
from flexfleet.tracking.server import PARENT, Client, active_run, address, connect, named_experiment, platform_of
from flexfleet.tracking.trackers import JOB, TOKEN, MLflow

MLFLOW_UI = "FLEXFLEET_MLFLOW_UI"
"""Environment variable with the address of MLflow's UI, if this address differs from `tracking.mlflow`."""
RUN_KEY = "site/run.json"
COMMIT = "mlflow.source.git.commit"
NOTE = "mlflow.note.content"
"""Tag with the description of an MLflow run."""
NOTES = {
    "regression": "Nightly regression run: {}.",
    "comparison": (
        "Compares variants: {}. The table variants.json has a row for each variant. The steps of the metrics "
        "variants/* are the numbers of these rows. For one curve per variant, group child runs by the tag algorithm."
    ),
}
"""Map the kind of an MLflow run with child runs to its description."""
COMPARISON, STUDY, SUITE = "flexfleet.comparison", "flexfleet.study", "flexfleet.suite"
"""Tags with the ID of the comparison or study, or the name of the nightly suite, to which an MLflow run belongs."""


def experiment(config: Config) -> str:
    """Return the name of the MLflow experiment from the configuration, MLFLOW_EXPERIMENT_NAME or the platform. If none
    of them sets a name, it consists of the data set (with a fingerprint for the user's own data), the network and the
    partition rule."""
    uri = config.tracking.mlflow
    if given := config.tracking.experiment or named_experiment() or (uri and platform_of(uri)[0]):
        return given
    data = stored_data.display_name(config.dataset.name, config.dataset.root)
    if data != config.dataset.name:
        data = f"{data}-{config.dataset.name.removeprefix(stored_data.PREFIX)[:8]}"
    return f"{data}-{config.model['name']}-{config.partition.rule}"


def prepare(config: Config) -> None:
    """Create the experiment, and the SQLite file if it is missing, before parallel processes use them. Raises
    ConfigError if the address cannot be used."""
    if (uri := config.tracking.mlflow) is not None:
        connect(uri, experiment(config), config.run.patience_s)


def tracker(
    config: Config,
    name: str,
    tags: Mapping[str, str],
    run_id: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> MLflow | None:
    """Continue the MLflow run whose ID is `run_id`, or whose token is in `tags`. If this run does not exist, start a
    new run. Returns None if tracking is off. Raises ConfigError if the address cannot be used."""
    uri = config.tracking.mlflow
    if uri is None:
        return None
    _, parent = platform_of(uri)
    below = {PARENT: parent} if parent else {}
    if (active := active_run()) is not None and address(active[0]) == address(uri):
        tags = {PARENT: active[2], **tags}
    tags = {**origin(tags), **tags, **below}
    return MLflow(uri, experiment(config), name, tags, run_id, config.run.patience_s, check)


def origin(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags for user, source and git commit of an MLflow run that has these `tags`. The source is
    the command or the script that started the run."""
    program, package = Path(sys.argv[0]), Path(__file__).parents[1]
    commands = {f"{JOB}job_id": "submit", STUDY: "tune", SUITE: "regress", COMPARISON: "compare"}
    command = next((word for tag, word in commands.items() if tag in tags), tags.get("flexfleet.kind", "run"))
    ours = program.name == "flexfleet" or f"{JOB}job_id" in tags or package in program.resolve().parents
    try:
        user = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (OSError, KeyError, ImportError):  # the user ID of a container can be unknown
        user = "unknown"
    source = f"flexfleet {command}" if ours else str(program)
    found = {"mlflow.user": user, "mlflow.source.name": source, "mlflow.source.type": "LOCAL", COMMIT: commit()}
    return {key: value for key, value in found.items() if value}


def commit() -> str | None:
    """Return the git commit of the image (FLEXFLEET_COMMIT) or of the checkout; None if the commit is unknown."""
    return os.environ.get("FLEXFLEET_COMMIT") or _git("rev-parse", "HEAD")


def code() -> str:
    """Return the git commit of the code. If the commit is unknown, return the version of flexfleet."""
    return commit() or f"version {fl_engine.__version__}"


def check_code(before: str | None, what: str) -> str:
    """Return the commit or version of the code (see `code`). Raises ConfigError if the code differs from `before`, the
    commit or version at the start of the comparison or nightly run `what`."""
    now = code()
    if before != now:
        raise ConfigError(
            f"{what} was started with the code {before}, but the current code is {now}. Restore the original code, or "
            "choose another --id (night_id in the pipeline)"
        )
    return now


def commits(before: str | None, now: str | None) -> tuple[str, ...]:
    """Return a line `hash subject` for each commit after `before` up to `now`; no lines outside a git checkout."""
    lines = _git("log", "--format=%h %s", f"{before}..{now}") if before and now else None
    return tuple((lines or "").splitlines())


def _git(*words: str) -> str | None:
    """Run git in the checkout of the code, and return git's output. Returns None if the code is not in a checkout."""
    here = ["git", "-C", str(Path(fl_engine.__file__).parent)]
    try:
        subprocess.run([*here, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=True)
        return subprocess.run([*here, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def new_token(kind: str, name: str, given: Mapping[str, str]) -> str:
    """Return a token for a new MLflow run. If the tags `given` name a pipeline run, retries get the same token."""
    job = given.get(f"{JOB}job_id")
    return sha256("\n".join([kind, job, name]).encode()) if job else uuid.uuid4().hex


def begin_parent(
    config: Config, kind: str, name: str, store: Store, tags: Mapping[str, str], run_id: str | None = None
) -> MLflow | None:
    """Start or continue the MLflow run of a comparison or nightly regression run (`kind`). Returns None if tracking is
    off. If `run_id` is None, a token in `store` identifies the MLflow run."""
    if config.tracking.mlflow is None:
        return None
    about = {NOTE: NOTES[kind].format(task_of(config)), "flexfleet.kind": kind, **tags}
    if run_id is None:
        key = f"{kind}.token"
        if key not in store.list(key):
            store.create(key, new_token(kind, name, tags).encode())
        about[TOKEN] = store.get(key).decode()
    return tracker(config, name, about, run_id)


def of_job(config: Config, job_id: str) -> dict[str, str]:
    """Return tags with the ID of the pipeline run, and with the URL of its page if FLEXFLEET_KUBEFLOW_UI is set."""
    ui = masked(os.environ.get("FLEXFLEET_KUBEFLOW_UI", "")).rstrip("/")
    return {f"{JOB}job_id": job_id, **({f"{JOB}run": f"{ui}/#/runs/details/{job_id}"} if ui else {})}


def task_of(config: Config) -> str:
    """Describe the network, the data and the clients of a run."""
    data = stored_data.display_name(config.dataset.name, config.dataset.root)
    return f"{config.model['name']} on {data}, {config.partition.clients} clients ({config.partition.rule})"


def tags(config: Config, run_id: str, store: str) -> dict[str, str]:
    return {
        NOTE: f"Trains {task_of(config)} with {config.algorithm['name']} and the seed {config.seed}.",
        "algorithm": str(config.algorithm["name"]),
        "seed": str(config.seed),
        "flexfleet.run_id": run_id,
        "flexfleet.store": store,
        "flexfleet.version": fl_engine.__version__,
    }


def name(run_id: str, given: Mapping[str, str]) -> str:
    """Return the name of a run's MLflow run: the run ID, after the ID of the comparison to which the run belongs."""
    return f"{given[COMPARISON]}/{run_id}" if COMPARISON in given else run_id


def start(
    config: Config, run: RunFile, out: Path, given: Mapping[str, str], check: Callable[[], object] = lambda: None
) -> MLflow | None:
    """Start or continue a run's MLflow run, and add the tags `given`. Returns None if tracking is off."""
    about = {**tags(config, run.run_id, str(out.resolve())), TOKEN: run.token, **given}
    return tracker(config, name(run.run_id, given), about, run.mlflow_run_id, check)


def inputs(
    mlflow: MLflow, config: Config, data_sha256: str, partition_sha256: str, trace_sha256: str | None = None
) -> None:
    """Log the environment of the run, and the digests of its data sets."""
    root = masked(config.dataset.root or "FLEXFLEET_DATA")
    mlflow.dataset(config.dataset.name, data_sha256, f"{root}/{config.dataset.name}", "training and test data")
    clients = f"{config.partition.rule}, {config.partition.clients} clients"
    mlflow.dataset(f"partition: {clients}", partition_sha256, "partition/partition.json", "who holds what")
    if trace_sha256 is not None and config.fleet.trace is not None:
        mlflow.dataset("trace", trace_sha256, masked(", ".join(config.fleet.trace.files)), "who is online when")
    mlflow.client.log_dict(mlflow.run_id, environment(), "environment.json")


def environment() -> dict[str, Any]:
    packages = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "commit": commit(),
        "image": os.environ.get("FLEXFLEET_IMAGE"),
        "packages": dict(sorted(packages.items(), key=lambda pair: pair[0].lower())),
    }


def begin(config: Config, run_id: str, store: Store, given: Mapping[str, str]) -> str:
    """Return the ID of the MLflow run that `federate` will continue; "" if tracking is off. If this run does not exist
    yet, create it with the status SCHEDULED. Raises ConfigError if the address cannot be used."""
    if config.tracking.mlflow is None:
        return ""
    key = "run.json" if isinstance(store, FolderStore) else RUN_KEY
    known = RunFile.of(store.get(key), store.uri(key)).mlflow_run_id if key in store.list(key) else None
    if known:
        return known
    about = {**tags(config, run_id, store.uri()), TOKEN: new_token("run", run_id, given), **given}
    mlflow = tracker(config, name(run_id, given), about)
    assert mlflow is not None, "something is tracked"
    mlflow.client.update_run(mlflow.run_id, status="SCHEDULED")
    return mlflow.run_id


def link(config: Config, mlflow_run_id: str) -> str:
    """Return the URL of the run's page in MLflow's UI. Return an empty string if MLflow is not a server."""
    uri = config.tracking.mlflow
    ui = masked(os.environ.get(MLFLOW_UI) or uri or "").rstrip("/")
    if uri is None or not mlflow_run_id or not ui.startswith(("http://", "https://")):
        return ""
    run = Client(uri).get_run(mlflow_run_id)
    return f"{ui}/#/experiments/{run.info.experiment_id}/runs/{mlflow_run_id}"


def card(config: Config, run_id: str, store_uri: str) -> str:
    """Return a Markdown table with information about a run that has started."""
    c = config
    seconds = c.rounds.stop_simulated_s
    limit = "" if seconds is None else f" at most, until {seconds:g} s on the simulated clock"
    rows = {
        "algorithm": f"`{c.algorithm['name']}`",
        "task": task_of(c),
        "rounds": f"{c.rounds.stop}{limit}, {100 * c.training.fraction:g} % of the clients each",
        "seed": str(c.seed),
        "backend": f"`{c.run.backend}`",
        "store": f"`{store_uri}`",
        "MLflow": masked(os.environ.get(MLFLOW_UI) or c.tracking.mlflow) if c.tracking.mlflow else "off",
        "code": code(),
    }
    table = [f"| {key} | {value} |" for key, value in rows.items()]
    more = f"After a failure, the same `run_id` resumes the run. [All parameters]({fl_engine.PARAMETER_TABLE})."
    return "\n".join([f"## {run_id}", "", "| | |", "|---|---|", *table, "", more, ""])

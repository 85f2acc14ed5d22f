"""What MLflow gets about a run besides its metrics: name and parent, data, code and environment.

A run is one MLflow run. In a pipeline the task `federate` begins it, because MLflow's import takes two seconds in each
task. There is one level of nesting: the runs of a comparison are children of the comparison's MLflow run, and
everything of a nightly run or study is a child of its MLflow run. In a Kubeflow with built-in MLflow everything is a
child of the pipeline's run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fl_engine
import flexfleet
from fl_engine.core.errors import ConfigError, masked
from fl_engine.datasets import stored_data
from fl_engine.storage.store import FolderStore, Store, sha256
from flexfleet.config import Config
from flexfleet.files.artifacts import RunFile
from flexfleet.tracking.server import PARENT, Platform, connect, experiment_of, platform_of
from flexfleet.tracking.trackers import JOB, TOKEN, MLflow

MLFLOW_UI = "FLEXFLEET_MLFLOW_UI"
"""Where people open MLflow, if that is another address than `tracking.mlflow`."""
RUN_KEY = "site/run.json"
COMMIT = "mlflow.source.git.commit"


def experiment(config: Config, at: Platform | None = None) -> str:
    """The name of a run's MLflow experiment: the configuration's, else that of the platform `at`, else one made from
    data set, network and partition. Data that were given in Python have the beginning of their fingerprint in it."""
    c = config
    given = c.tracking.experiment or (at.experiment if at else None)
    data = stored_data.display_name(c.dataset.name, c.dataset.root)
    if data != c.dataset.name:
        data = f"{data}-{c.dataset.name.removeprefix(stored_data.PREFIX)[:8]}"
    return given or f"{data}-{c.model['name']}-{c.partition.rule}"


def prepare(config: Config) -> None:
    """Create the experiment, and a missing SQLite file, before several processes need them at the same time. Raises
    ConfigError if the address cannot be used."""
    if (uri := config.tracking.mlflow) is not None:
        connect(uri, experiment(config, platform_of(uri)))


def tracker(
    config: Config,
    name: str,
    tags: Mapping[str, str],
    run_id: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> MLflow | None:
    """Continue the MLflow run `run_id`, or the one with the token in `tags`, or begin one, below the platform's run if
    there is one. None without tracking. `check` is passed to `Patient`. Raises ConfigError if the address cannot be
    used."""
    uri = config.tracking.mlflow
    if uri is None:
        return None
    at = platform_of(uri)
    below = {PARENT: at.parent} if at.parent else {}
    return MLflow(uri, experiment(config, at), name, {**tags, **below}, run_id, config.run.patience_s, check)


def commit() -> str | None:
    """The commit of the code: the image's (FLEXFLEET_COMMIT), else the checkout's, else None."""
    return os.environ.get("FLEXFLEET_COMMIT") or _git("rev-parse", "HEAD")


def code() -> str:
    """The commit of the code, else a digest of its files, as in an image that was built without COMMIT."""
    return commit() or f"unknown (files {_files_sha256()[:12]})"


def _files_sha256() -> str:
    lines = []
    for package in (fl_engine, flexfleet):
        folder = Path(str(package.__file__)).parent
        for file in (each for ending in ("py", "yaml", "json") for each in folder.rglob(f"*.{ending}")):
            lines.append(f"{package.__name__}/{file.relative_to(folder).as_posix()} {sha256(file.read_bytes())}")
    return sha256("\n".join(sorted(lines)).encode())


def check_code(before: str | None, what: str) -> str:
    """Return `code`. Raises ConfigError if `what` was begun with other code, `before`."""
    now = code()
    if before != now:
        raise ConfigError(
            f"{what} was begun with the code {before}, this is {now}. Continue with that code, or choose another --id "
            "(in the pipeline, night_id)"
        )
    return now


def commits(before: str | None, now: str | None) -> tuple[str, ...]:
    """`hash subject` of each commit after `before` up to `now`, newest first; empty if the code is no checkout."""
    told = _git("log", "--format=%h %s", f"{before}..{now}") if before and now else None
    return tuple((told or "").splitlines())


def _git(*words: str) -> str | None:
    """What git prints about the code's checkout; None if the code is not a file of a checkout."""
    here = ["git", "-C", str(Path(fl_engine.__file__).parent)]
    try:
        subprocess.run([*here, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=True)
        return subprocess.run([*here, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def token_of(kind: str, tokens: Iterable[str]) -> str:
    """The token of a comparison or nightly run (`kind`), made from tokens in any order."""
    return sha256("\n".join([kind, *sorted(tokens)]).encode())


def token_key(kind: str) -> str:
    """The key in a store of what `lasting_token` keeps there."""
    return f"{kind}.token"


def new_token(kind: str, name: str, given: Mapping[str, str]) -> str:
    """A token for what is begun under this name. In a pipeline run, which the tags `given` name, the first task gets
    the same token again in a new pod."""
    job = given.get(f"{JOB}job_id")
    return token_of(kind, [job, name]) if job else uuid.uuid4().hex


def lasting_token(kind: str, store: Store, fresh: str) -> str:
    """The token of a comparison or nightly run in `store`, where `fresh` is stored for a new one. So the MLflow run
    exists before its runs do, and stays the same when runs are added."""
    key = token_key(kind)
    if key not in store.list(key):
        store.create(key, fresh.encode())
    return store.get(key).decode()


def known_file(store: Store) -> RunFile | None:
    """The run.json in a run's store, if the run has begun."""
    key = "run.json" if isinstance(store, FolderStore) else RUN_KEY
    return RunFile.of(store.get(key), store.uri(key)) if key in store.list(key) else None


def of_job(config: Config, job_id: str) -> dict[str, str]:
    """Tags of what a pipeline run makes: the pipeline run's id, and its page if the
    environment's FLEXFLEET_KUBEFLOW_UI says where people open Kubeflow Pipelines."""
    ui = masked(os.environ.get("FLEXFLEET_KUBEFLOW_UI", "")).rstrip("/")
    return {f"{JOB}job_id": job_id, **({f"{JOB}run": f"{ui}/#/runs/details/{job_id}"} if ui else {})}


def tags(config: Config, run_id: str, store: str) -> dict[str, str]:
    at = commit()
    return {
        "algorithm": str(config.algorithm["name"]),
        "seed": str(config.seed),
        "flexfleet.run_id": run_id,
        "flexfleet.store": store,
        "flexfleet.version": fl_engine.__version__,
        **({COMMIT: at} if at else {}),
    }


def name(config: Config, given: Mapping[str, str]) -> str:
    return f"{given.get('algorithm', config.algorithm['name'])}-s{config.seed}"


def start(
    config: Config,
    run: RunFile,
    out: Path,
    given: Mapping[str, str],
    check: Callable[[], object] = lambda: None,
) -> MLflow | None:
    """Begin the MLflow run, or continue it; None without tracking. `given` are more tags; `check` is for `Patient`."""
    about = {**tags(config, run.run_id, str(out.resolve())), TOKEN: run.token, **given}
    return tracker(config, name(config, given), about, run.mlflow_run_id, check)


def inputs(
    mlflow: MLflow, config: Config, data_sha256: str, partition_sha256: str, trace_sha256: str | None = None
) -> None:
    """Log the run's data, with digests, and its environment."""
    root = masked(config.dataset.root or "FLEXFLEET_DATA")
    mlflow.dataset(config.dataset.name, data_sha256, f"{root}/{config.dataset.name}", "training and test data")
    clients = f"{config.partition.rule}, {config.partition.clients} clients"
    mlflow.dataset(f"partition: {clients}", partition_sha256, "partition/partition.json", "who holds what")
    if trace_sha256 is not None and config.fleet.trace is not None:
        mlflow.dataset("trace", trace_sha256, masked(", ".join(config.fleet.trace.files)), "who is online when")
    mlflow.file(environment(), "environment.json")


def environment() -> dict[str, Any]:
    """The environment of the code."""
    packages = dict(filter(None, map(_package, metadata.distributions())))
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "commit": commit(),
        "image": os.environ.get("FLEXFLEET_IMAGE"),
        "packages": dict(sorted(packages.items(), key=lambda pair: pair[0].lower())),
    }


def _package(distribution: metadata.Distribution) -> tuple[str, str] | None:
    """Name and version, from the head of the metadata, because parsing hundreds of descriptions takes a second."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    head = HeaderParser().parsestr(text.partition("\n\n")[0])
    name, version = head["Name"], head["Version"]
    return (name, version) if name and version else None


# ------------------------------------------------------------------------------------------- the tasks of a graph
def begin(config: Config, run_id: str, store: Store, given: Mapping[str, str]) -> str:
    """The ID of the MLflow run that `federate` continues: the one in `store` if an earlier pipeline run has begun the
    run, else a new one with the status SCHEDULED. Empty without tracking. Raises ConfigError if the address cannot be
    used."""
    if config.tracking.mlflow is None:
        return ""
    known = known_file(store)
    if known is not None and known.mlflow_run_id:
        return known.mlflow_run_id
    about = {**tags(config, run_id, store.uri()), TOKEN: new_token("run", run_id, given), **given}
    mlflow = tracker(config, name(config, given), about)
    assert mlflow is not None, "something is tracked"
    mlflow.wait()
    return mlflow.run_id


def link(config: Config, mlflow_run_id: str) -> str:
    """The address of the run's page; empty if there is no MLflow server."""
    ui = _ui(config)
    if config.tracking.mlflow is None or not mlflow_run_id or not ui:
        return ""
    experiment_id = experiment_of(config.tracking.mlflow, mlflow_run_id)
    return f"{ui}/#/experiments/{experiment_id}/runs/{mlflow_run_id}"


def link_to_curves(config: Config, experiment_id: str, run_ids: Sequence[str], metrics: Sequence[str]) -> str:
    """Return the address of the page where MLflow draws these `metrics` of several runs over the rounds; empty if there
    is no MLflow server."""
    ui = _ui(config)
    if not ui or not run_ids:
        return ""
    query = {"runs": run_ids, "metric": metrics[0], "experiments": [experiment_id], "plot_metric_keys": metrics}
    # MLflow's page expects `runs` first, and JSON in all parameters but the axis.
    text = "&".join(f"{key}={quote(json.dumps(value, separators=(',', ':')), safe='')}" for key, value in query.items())
    return f"{ui}/#/metric?{text}&x_axis=step"


def _ui(config: Config) -> str:
    """Where people open MLflow; empty if it is no server, or if nothing is tracked."""
    uri = masked(os.environ.get(MLFLOW_UI) or config.tracking.mlflow or "").rstrip("/")
    return uri if config.tracking.mlflow is not None and uri.startswith(("http://", "https://")) else ""


def card(config: Config, run_id: str, store_uri: str) -> str:
    """Markdown: what has begun, and where to see it."""
    c, at = config, masked(os.environ.get(MLFLOW_UI) or config.tracking.mlflow or "")
    data = stored_data.display_name(c.dataset.name, c.dataset.root)
    tracked = f"{at} (the task of the federated rounds begins the run)"
    if c.tracking.mlflow is None:
        tracked = "off: no `mlflow_uri`, and none of Kubeflow's"
    seconds = c.rounds.stop_simulated_s
    limit = "" if seconds is None else f" at most, until {seconds:g} s on the simulated clock"
    rows = {
        "algorithm": f"`{c.algorithm['name']}`",
        "task": f"{c.model['name']} on {data}, {c.partition.clients} clients ({c.partition.rule})",
        "rounds": f"{c.rounds.stop}{limit}, {100 * c.training.fraction:g} % of the clients each",
        "seed": str(c.seed),
        "backend": f"`{c.run.backend}`",
        "store": f"`{store_uri}`",
        "MLflow": tracked,
        "code": commit() or fl_engine.__version__,
    }
    table = [f"| {key} | {value} |" for key, value in rows.items()]
    told = f"After a failure, the same `run_id` resumes it. [All parameters]({fl_engine.PARAMETER_TABLE})."
    return "\n".join([f"## {run_id}", "", "| | |", "|---|---|", *table, "", told, ""])

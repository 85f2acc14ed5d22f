"""What MLflow is told of a run besides its figures: who it is, its data, code and environment.

A run is one flat MLflow run. Where it is a pipeline's, the first task begins it, so that there is something to look at
while the others wait for their pods; `federate` goes on with it.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import fl_engine
from components.artifacts import RunFile
from fl_engine.config import Config
from fl_engine.errors import masked
from fl_engine.store import FolderStore, Store, sha256
from fl_engine.tracking import TOKEN, MLflow, connect

RUN_KEY = "site/run.json"
COMMIT = "mlflow.source.git.commit"


def experiment(config: Config) -> str:
    """The name of the MLflow experiment that a run belongs to."""
    c = config
    return c.tracking.experiment or f"{c.dataset.name}-{c.model['name']}-{c.partition.rule}"


def commit() -> str | None:
    """The commit of the code: what the image says (FLEXFLEET_COMMIT), else that of the checkout; None where neither
    does."""
    return os.environ.get("FLEXFLEET_COMMIT") or _git("rev-parse", "HEAD")


def commits(before: str | None, now: str | None) -> tuple[str, ...]:
    """`hash subject` of each commit after `before` up to `now`, newest first; empty where the code is no checkout."""
    told = _git("log", "--format=%h %s", f"{before}..{now}") if before and now else None
    return tuple((told or "").splitlines())


def _git(*words: str) -> str | None:
    """What git says of the code's checkout; None where there is none: installed below somebody else's checkout, the
    code is none of its files."""
    here = ["git", "-C", str(Path(fl_engine.__file__).parent)]
    try:
        subprocess.run([*here, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=True)
        return subprocess.run([*here, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def token_of(kind: str, tokens: Iterable[str]) -> str:
    """Of what is made from several runs, by their tokens: the same runs in any order have one for each kind."""
    return sha256("\n".join([kind, *sorted(tokens)]).encode())


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


def start(config: Config, run: RunFile, out: Path, given: Mapping[str, str]) -> MLflow | None:
    """Begins the MLflow run, or goes on with it; None where nothing is tracked. `given`: more tags."""
    if config.tracking.mlflow is None:
        return None
    about = {**tags(config, run.run_id, str(out.resolve())), TOKEN: run.token, **given}
    return MLflow(config.tracking.mlflow, experiment(config), name(config, given), about, run.mlflow_run_id)


def inputs(mlflow: MLflow, config: Config, data_sha256: str, partition_sha256: str) -> None:
    """The data that the run is made of, with digests, and the environment it is made in."""
    root = masked(config.dataset.root or "FLEXFLEET_DATA")
    mlflow.dataset(config.dataset.name, data_sha256, f"{root}/{config.dataset.name}", "training and test data")
    clients = f"{config.partition.rule}, {config.partition.clients} clients"
    mlflow.dataset(f"partition: {clients}", partition_sha256, "partition/partition.json", "who holds what")
    mlflow.file(environment(), "environment.json")


def environment() -> dict[str, Any]:
    """What the code runs in: with constraints.txt, enough to make it again."""
    packages = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "commit": commit(),
        "image": os.environ.get("FLEXFLEET_IMAGE"),
        "packages": dict(sorted(packages.items(), key=lambda pair: pair[0].lower())),
    }


# ------------------------------------------------------------------------------------ the first task of a graph
def begin(config: Config, run_id: str, store: Store, given: Mapping[str, str]) -> str:
    """The id of the MLflow run that the coming tasks go on with: the one that `store` knows where the run has begun in
    an earlier job, else a new one, which waits ("SCHEDULED"). Empty where nothing is tracked.

    Raises ConfigError where the address cannot be used.
    """
    uri = config.tracking.mlflow
    if uri is None:
        return ""
    key = "run.json" if isinstance(store, FolderStore) else RUN_KEY
    if key in store.list(key):
        known = RunFile.of(store.get(key), store.uri(key)).mlflow_run_id
        if known:
            return known
    client, experiment_id = connect(uri, experiment(config))
    about = {**tags(config, run_id, store.uri()), **given}
    run = client.create_run(experiment_id, run_name=name(config, given), tags=about)
    client.update_run(run.info.run_id, status="SCHEDULED")
    return str(run.info.run_id)


def link(config: Config, mlflow_run_id: str) -> str:
    """Where a browser finds the run; empty where there is no server to ask."""
    uri = masked(config.tracking.ui or config.tracking.mlflow or "")
    if not mlflow_run_id or not uri.startswith(("http://", "https://")):
        return ""
    _, experiment_id = connect(config.tracking.mlflow or "", experiment(config))
    return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{mlflow_run_id}"


def card(config: Config, run_id: str, store_uri: str, mlflow_run_id: str) -> str:
    """Markdown: what has been started, and where to look."""
    c, at = config, link(config, mlflow_run_id)
    tracked = f"[{mlflow_run_id}]({at})" if at else mlflow_run_id or "off: `mlflow_uri` is empty"
    rows = {
        "algorithm": f"`{c.algorithm['name']}`",
        "task": f"{c.model['name']} on {c.dataset.name}, {c.partition.clients} clients ({c.partition.rule})",
        "rounds": f"{c.rounds.stop}, {100 * c.training.fraction:g} % of the clients each",
        "seed": str(c.seed),
        "backend": f"`{c.run.backend}`",
        "store": f"`{store_uri}`",
        "MLflow": tracked,
        "code": commit() or fl_engine.__version__,
    }
    table = [f"| {key} | {value} |" for key, value in rows.items()]
    told = f"The same `run_id` goes on with it after a failure. [All parameters]({fl_engine.PARAMETER_TABLE})."
    return "\n".join([f"## {run_id}", "", "| | |", "|---|---|", *table, "", told, ""])

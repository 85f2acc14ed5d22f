"""Contact the servers that a configuration uses (`flexfleet check --connect`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread

from fl_engine.core.errors import EnvironmentFailure, first_line, masked
from fl_engine.storage.probe import upload_verb
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from flexfleet.config import Config
from flexfleet.files.run_folder import check_writable
from flexfleet.files.terminal import expected
from flexfleet.kubeflow.client import ENDPOINT, connected
from flexfleet.pipeline import keys
from flexfleet.pipeline.check import try_store
from flexfleet.pipeline.survey import survey
from flexfleet.tracking import dvc_remote
from flexfleet.tracking.server import SQLITE, Client, check_server

LIMIT_S = 5.0
"""Seconds within which a server must respond."""
PACKAGES = {
    "run.remote": ("boto3",), "run.secrets": ("boto3",), "tracking.mlflow": ("mlflow",),
    "publish.dvc": ("dvc.repo", "dvc_s3", "s3fs"), "kubernetes": ("kubernetes",), "kubeflow": ("kfp",),
}  # fmt: skip
"""Packages that are imported before the time is measured."""


@dataclass
class Connection:
    """Result of contacting a server."""

    name: str
    """Parameter that contains the address, `kubernetes` or `kubeflow`."""
    address: str
    ok: bool = False
    message: str = f"no response within {LIMIT_S:.0f} s"
    seconds: float = LIMIT_S

    def __str__(self) -> str:
        return f"{self.name:16}{'ok' if self.ok else 'FAILED':8}{self.address}: {self.message} ({self.seconds:.1f} s)"


Probe = Callable[[], object]
"""Function that contacts a server and returns a message. It raises an error if the server cannot be used."""


def connections(config: Config) -> list[Connection]:
    """Contact all servers that the configuration or the environment names, in parallel. The result is complete after
    LIMIT_S seconds, even if a server does not respond."""
    found, threads = [], []
    for name, (address, probe) in _probes(config).items():
        found.append(Connection(name, masked(address)))
        try:
            for package in PACKAGES[name]:
                import_module(package)
        except ModuleNotFoundError as error:
            found[-1].message, found[-1].seconds = str(expected(error)), 0.0
        else:
            threads.append(Thread(target=_contact, args=(found[-1], probe), daemon=True))
    stdout, end = sys.stdout, time.monotonic() + LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    sys.stdout = stdout  # a late thread may still hide what Kubeflow's SDK prints
    return [replace(connection) for connection in found]  # late threads change only the originals


def _probes(config: Config) -> Mapping[str, tuple[str, Probe]]:
    run, found = config.run, dict[str, tuple[str, Probe]]()
    if run.remote is not None and "://" in run.remote:
        found["run.remote"] = run.remote, lambda: _bucket(S3Store(str(run.remote), hasty=True), run.apart)
    if run.secrets is not None and "://" in run.secrets:
        found["run.secrets"] = run.secrets, lambda: _bucket(keys.shared_place(config, "probe", hasty=True), False)
    if (uri := config.tracking.mlflow) is not None:
        found["tracking.mlflow"] = uri, lambda: _experiments(uri)
    if (remote := config.publish.dvc) is not None:
        found["publish.dvc"] = dvc_remote.place_of(remote), lambda: _dvc(remote)
    if run.backend == "kubernetes":
        tiers = [tier.name for tier in config.fleet.tiers]
        found["kubernetes"] = config.kubernetes.namespace, lambda: survey(config.kubernetes, tiers)
    if endpoint := os.environ.get(ENDPOINT):
        found["kubeflow"] = endpoint, _kubeflow
    return found


def _contact(connection: Connection, probe: Probe) -> None:
    began = time.monotonic()
    try:
        message, ok = str(probe()), True
    except Exception as error:
        known = expected(error) or EnvironmentFailure(f"{type(error).__name__}: {first_line(error)}")
        message, ok = known.as_json()["message"], False
    connection.message, connection.ok, connection.seconds = message, ok, time.monotonic() - began


def _bucket(store: Store, for_clients: bool) -> str:
    try_store(store)
    done = "objects can be written, read, listed and deleted"
    if for_clients and isinstance(store, S3Store):
        done += f"; clients upload with {upload_verb(store)}"
    return done


def _experiments(uri: str) -> str:
    check_server(uri)
    file = Path(uri.removeprefix(SQLITE))
    if uri.startswith(SQLITE) and "?" not in uri and not file.exists():
        check_writable("tracking.mlflow", file.parent)
        return "the run creates this file"
    Client(uri).search_experiments(max_results=1)
    return "experiments can be listed"


def _dvc(remote: str) -> str:
    if remote.startswith("s3://"):  # S3Store reports a reason, while DVC's file system retries for a long time
        S3Store(remote, hasty=True).list("probe-")
    if "://" in (place := dvc_remote.place_of(remote)):
        dvc_remote.probe(remote)
    else:
        check_writable("publish.dvc", Path(place))
    return "files can be written and deleted"


def _kubeflow() -> str:
    with connected(None, (LIMIT_S - 1, LIMIT_S - 1)) as client:
        several = client.get_kfp_healthz().multi_user
    return f"Kubeflow Pipelines for {'several users' if several else 'one user'}"

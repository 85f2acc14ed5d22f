"""Kubeflow's API server through its SDK: without the SDK's own output, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fl_engine.core.errors import EnvironmentFailure, certificate_hint, masked, printable

ENDPOINT = "KF_PIPELINES_ENDPOINT"
PORT_FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"
WAY_IN = f"Where it is in a cluster, type `{PORT_FORWARD}`, leave that open, and give --host http://localhost:8080"
TIMEOUT_S = (10, 60)
"""Seconds to connect, and to answer: a port-forward whose pod is gone may take requests and never answer."""


class Unreachable(EnvironmentFailure):
    """Nothing answers, or the server is busy; it may answer later."""


@contextlib.contextmanager
def connected(host: str | None) -> Iterator[Any]:
    """The SDK's client. `host`: None means the server that the SDK finds: KF_PIPELINES_ENDPOINT, a pod's cluster,
    KUBECONFIG. Raises what `explained` raises, also for requests inside the context."""
    if not (host or os.environ.get(ENDPOINT) or os.environ.get("KUBERNETES_SERVICE_HOST") or _kubeconfig()):
        raise Unreachable(f"the address of Kubeflow Pipelines is not set: --host, or {ENDPOINT}. {WAY_IN}")
    # Hides the links that the SDK prints, and its warning that it needs Kubeflow 2.
    with explained(host), quiet_retries(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import kfp

        yield kfp.Client(host=host)


@contextlib.contextmanager
def quiet_retries() -> Iterator[None]:
    """Hides urllib3's line for each of its attempts; their outcome is reported."""
    retries = logging.getLogger("urllib3.connectionpool")
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        yield
    finally:
        retries.setLevel(level)


def _kubeconfig() -> bool:
    return bool(os.environ.get("KUBECONFIG")) or Path(os.path.expanduser("~/.kube/config")).is_file()


@contextlib.contextmanager
def explained(host: str | None) -> Iterator[None]:
    """Raises EnvironmentFailure if the server refuses a request, Unreachable if it does not answer."""
    from kfp_server_api.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    where = f"Kubeflow Pipelines at {masked(host or os.environ.get(ENDPOINT) or 'its address in KUBECONFIG')}"
    try:
        yield
    except ApiException as error:
        body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
        said = printable(f"{error.status} {error.reason} {body[:300]}")
        if error.status == 429 or (error.status or 500) >= 500:
            raise Unreachable(f"{where} is not ready: {said}") from error
        raise EnvironmentFailure(f"Kubeflow Pipelines refused: {said}") from error
    except (HTTPError, TimeoutError) as error:
        told = masked(str(getattr(error, "reason", None) or error))
        why = printable(told.rpartition(": ")[2]) + certificate_hint(told)
        raise Unreachable(f"{where} cannot be reached: {why}. {WAY_IN}") from error


def link(client: Any, page: str, id: str) -> str:
    """The address of a page in the UI; empty if the UI's address is not known."""
    prefix = str(client._get_url_prefix())
    return f"{prefix}/#/{page}/details/{id}" if prefix.startswith(("http://", "https://")) else ""


def run_of(client: Any, id: str) -> Any:
    """A run as the server has it. Raises EnvironmentFailure if something else answers."""
    run = client._run_api.run_service_get_run(id, _request_timeout=TIMEOUT_S)
    if run.run_id != id:
        raise EnvironmentFailure(
            f"what answers is not the API of Kubeflow Pipelines (a page to log in, perhaps): it does not say the id of "
            f"the run {id}. {WAY_IN}"
        )
    return run


def parameters_of(client: Any, run: Any) -> dict[str, Any]:
    """A run's parameters: the given ones, and the defaults of its pipeline if the server has them."""
    given: dict[str, Any] = (run.runtime_config and run.runtime_config.parameters) or {}
    spec, version = run.pipeline_spec or {}, run.pipeline_version_reference
    if not spec and version is not None:
        with contextlib.suppress(EnvironmentFailure), explained(None):
            get = client._pipelines_api.pipeline_service_get_pipeline_version
            asked = get(version.pipeline_id, version.pipeline_version_id, _request_timeout=TIMEOUT_S)
            spec = asked.pipeline_spec or {}
    spec = spec.get("pipeline_spec", spec)  # beside the platform's specification, if there is one
    form = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {})
    return {**{name: about.get("defaultValue") for name, about in form.items()}, **given}


def pages(ask: Callable[[str], Any], field: str) -> Iterator[Any]:
    """All items of a list, page by page. `ask` takes the token of a page."""
    token = ""
    while True:
        page = ask(token)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return

"""Kubeflow's API server through its SDK: without the SDK's own output, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, first_line, masked, printable
from flexfleet.kubeflow.shapes import ID
from flexfleet.kubeflow.transport import WAY_IN, bound, last_asked

ENDPOINT = "KF_PIPELINES_ENDPOINT"
LIST_S = 120.0
"""Seconds that all pages of a list may take."""


@contextlib.contextmanager
def connected(host: str | None) -> Iterator[Any]:
    """The SDK's client. `host`: None means the server that the SDK finds: KF_PIPELINES_ENDPOINT, a pod's cluster,
    KUBECONFIG. Raises ConfigError for an address that is none, or where there is none at all; a request raises what
    `transport.Pool.request` raises."""
    if not (host or os.environ.get(ENDPOINT) or os.environ.get("KUBERNETES_SERVICE_HOST") or _kubeconfig()):
        raise ConfigError(f"the address of Kubeflow Pipelines is not set: --host, or {ENDPOINT}. {WAY_IN}")
    check_host(host, "--host") if host else check_host(os.environ.get(ENDPOINT, ""), ENDPOINT)
    # Hides the links that the SDK prints, and its warnings: that it needs Kubeflow 2, and puts https:// before a host.
    with quiet_retries(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        for kind in (FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        yield _client(host)


def _client(host: str | None) -> Any:
    import kfp

    class Client(kfp.Client):  # type: ignore[misc]
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            """Asks once, within the bounds: the SDK's own asks five times in half a minute, whatever is answered, and
            logs each traceback."""
            bound(self._healthz_api.api_client)
            return self._healthz_api.healthz_service_get_healthz()

    try:
        client = Client(host=host)
    except FlexfleetError:
        raise
    except Exception as error:  # it reads files of several kinds, and asks Google for tokens
        why = printable(f"{type(error).__name__}: {first_line(error)}")
        raise EnvironmentFailure(
            f"the SDK of Kubeflow Pipelines cannot be set up: {why} (it reads {kfp.Client._LOCAL_KFP_CONTEXT}, the "
            "variables KF_PIPELINES_*, KUBECONFIG)"
        ) from error
    bound(client._run_api.api_client)
    return client


def check_host(address: str, name: str) -> None:
    """Raises ConfigError for an address that is none. `name`: of the option or variable that gives it."""
    try:
        parts = urlsplit(address if "://" in address else f"https://{address}")  # as the SDK reads it
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if address and not (good and address.isprintable() and " " not in address and not parts.query + parts.fragment):
        raise ConfigError(
            f"{name} is the address of Kubeflow Pipelines, like http://localhost:8080, without what follows a # or a ? "
            f"in the browser; got {masked(address)!r}"
        )


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


def link(client: Any, page: str, id: str) -> str:
    """The address of a page in the UI; empty if the UI's address is not known."""
    prefix = masked(str(client._get_url_prefix()))
    return f"{prefix}/#/{page}/details/{id}" if prefix.startswith(("http://", "https://")) else ""


def id_of(client: Any, thing: Any, field: str) -> str:
    """The id in the last answer, which becomes a part of addresses. Raises EnvironmentFailure if there is none, and
    Undecided if the question was to make it."""
    id = getattr(thing, field)
    if not isinstance(id, str) or not ID.fullmatch(id):
        raise last_asked(client).not_the_api(f"{printable(repr(id))[:80]} as {field}")
    return id


def run_of(client: Any, id: str) -> Any:
    """A run as the server has it. Raises EnvironmentFailure if something else answers."""
    run = client._run_api.run_service_get_run(id)
    if run.run_id != id:
        raise last_asked(client).not_the_api(f"no run with the id {id}")
    return run


def parameters_of(client: Any, run: Any) -> dict[str, Any]:
    """A run's parameters: the given ones, and the defaults of its pipeline if the server has them."""
    given: dict[str, Any] = (run.runtime_config and run.runtime_config.parameters) or {}
    spec, version = run.pipeline_spec, run.pipeline_version_reference
    if not spec and version is not None:
        with contextlib.suppress(FlexfleetError):
            get = client._pipelines_api.pipeline_service_get_pipeline_version
            spec = get(version.pipeline_id or "", version.pipeline_version_id or "").pipeline_spec
    spec = _in(spec, "pipeline_spec") or spec  # beside the platform's specification, if there is one
    form = _in(spec, "root", "inputDefinitions", "parameters")
    return {**{name: _in(form, name).get("defaultValue") for name in form}, **given}


def _in(value: Any, *keys: str) -> dict[str, Any]:
    """The object at the end of these keys; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def equal(key: str, value: str, operation: str = "EQUALS") -> str:
    """A filter of the API. (Not every server keeps to it: what it lists is to be looked at.)"""
    return json.dumps({"predicates": [{"operation": operation, "key": key, "stringValue": value}]})


def pages(client: Any, ask: Callable[..., Any], field: str) -> Iterator[Any]:
    """All items of a list, page by page. `ask` takes `page_token` and `page_size`. Raises EnvironmentFailure for a list
    that does not end within LIST_S."""
    token, seen, end = "", set[str](), time.monotonic() + LIST_S
    while True:
        page = ask(page_token=token, page_size=100)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return
        if token in seen or time.monotonic() > end:
            why = "names a page again" if token in seen else f"has not ended after {LIST_S:g} s"
            raise last_asked(client).not_the_api(f"a list that {why}, of {len(seen) + 1} pages so far")
        seen.add(token)

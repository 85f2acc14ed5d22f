"""The SDK's client of Kubeflow Pipelines, without its output, with timeouts, and with errors that name the cure."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    FlexfleetError,
    Unreachable,
    certificate_hint,
    first_line,
    masked,
    printable,
)

ENDPOINT, UI_ENDPOINT = "KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT"
TIMEOUT_S = (10.0, 60.0)
"""Seconds to connect, and seconds to wait for data. A port-forward whose pod is gone accepts requests and never
answers."""
SHOWN = 300
"""Longest part of a server's message that an error shows, in characters."""

PORT_FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"
WAY_IN = f"For a Kubeflow in a cluster, run `{PORT_FORWARD}` and use --host http://localhost:8080"
LOG_IN = f"The SDK's credentials are missing or have expired: log in again, or bypass the login page. {WAY_IN}"
ADVICE = {
    401: LOG_IN,
    403: "The credentials do not allow this. If Kubeflow has several users, --namespace must name your profile",
    404: f"Check the path in --host; Kubeflow Pipelines must be version 2. {WAY_IN}",
}


class NotFound(EnvironmentFailure):
    """Kubeflow answers that the object does not exist."""


@contextlib.contextmanager
def connected(host: str | None) -> Iterator[Any]:
    """Yield the SDK's `kfp.Client`, and translate the errors of its calls (see `translated`).

    Args:
        host: Address of Kubeflow Pipelines. None: the server that the SDK finds by KF_PIPELINES_ENDPOINT, in a pod, or
            by KUBECONFIG.

    Raises:
        ConfigError: The address is missing or malformed.
    """
    check_host(host, "--host") if host else check_host(os.environ.get(ENDPOINT, ""), ENDPOINT)
    kubeconfig = os.environ.get("KUBECONFIG") or Path(os.path.expanduser("~/.kube/config")).is_file()
    if not (host or os.environ.get(ENDPOINT) or os.environ.get("KUBERNETES_SERVICE_HOST") or kubeconfig):
        raise ConfigError(f"the address of Kubeflow Pipelines is not set: use --host or {ENDPOINT}. {WAY_IN}")
    with quiet(), translated():
        with without_links(), warnings.catch_warnings():
            for kind in (FutureWarning, UserWarning):  # that it needs Kubeflow 2, and adds https:// to a host
                warnings.simplefilter("ignore", kind)
            client = _client(host)
        yield client


def without_links() -> contextlib.redirect_stdout[io.StringIO]:
    """Hide the links that the SDK prints when it creates something."""
    return contextlib.redirect_stdout(io.StringIO())


def _client(host: str | None) -> Any:
    import kfp
    import urllib3
    from kfp_server_api import ApiException

    class Client(kfp.Client):  # type: ignore[misc]
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            """Ask once. The SDK asks five times, and logs a traceback each time."""
            _set_timeout(self)
            return self._healthz_api.healthz_service_get_healthz()

    try:
        client = Client(host=host)
    except (FlexfleetError, ApiException, urllib3.exceptions.HTTPError):
        raise
    except Exception as error:  # it reads files of several kinds, and may request tokens from Google
        why = printable(f"{type(error).__name__}: {first_line(error)}")
        raise EnvironmentFailure(
            f"the SDK of Kubeflow Pipelines cannot be set up: {why}. Check {kfp.Client._LOCAL_KFP_CONTEXT}, the "
            "variables KF_PIPELINES_*, and KUBECONFIG"
        ) from error
    if client.get_kfp_healthz().multi_user is None:
        raise EnvironmentFailure(f"the address does not answer as the API of Kubeflow Pipelines does. {LOG_IN}")
    return client


def api_of(client: Any) -> Any:
    """Return the SDK's `kfp_server_api.ApiClient`, for calls that `kfp.Client` does not have."""
    return client._run_api.api_client


def _set_timeout(client: Any) -> None:
    rest = api_of(client).rest_client
    if not hasattr(rest, "without_timeout"):
        rest.without_timeout = rest.request
        rest.request = lambda *args, **more: rest.without_timeout(*args, **more | {"_request_timeout": TIMEOUT_S})


def check_host(address: str, name: str) -> None:
    """Raise ConfigError for a malformed address. `name`: the option or variable that holds it."""
    try:
        parts = urlsplit(address if "://" in address else f"https://{address}")  # as the SDK reads it
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if address and not (good and address.isprintable() and " " not in address and not parts.query + parts.fragment):
        raise ConfigError(
            f"{name} must be the address of Kubeflow Pipelines, like http://localhost:8080, without the part that "
            f"follows # or ? in the browser; got {masked(address)!r}"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide urllib3's line for each attempt; the outcome is reported."""
    retries = logging.getLogger("urllib3.connectionpool")
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        yield
    finally:
        retries.setLevel(level)


# ------------------------------------------------------------------------------------------------------- errors
@contextlib.contextmanager
def translated(*untranslated: type[Exception]) -> Iterator[None]:
    """Translate errors of the SDK's calls: Unreachable if the server does not answer or is not ready, NotFound,
    ConfigError for a value that it refuses, and EnvironmentFailure for every other refusal."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except untranslated:
        raise
    except ApiException as error:
        raise _refused(error) from error
    except HTTPError as error:
        pool = getattr(error, "pool", None)
        where = f" at {pool.scheme}://{pool.host}:{pool.port}" if pool is not None else ""
        raise _no_answer(where, str(getattr(error, "reason", None) or error)) from error


def _no_answer(where: str, said: str) -> Unreachable:
    why = printable(masked(re.sub(r"\[SSL: \w+\] ", "", said)).rpartition(": ")[2].strip("'\")>")) + certificate_hint(
        said
    )
    hint = ". If the server uses HTTP without TLS, write --host http://..." if "WRONG_VERSION_NUMBER" in said else ""
    return Unreachable(f"Kubeflow Pipelines{where} cannot be reached: {why}{hint}. {WAY_IN}")


def _refused(error: Any) -> EnvironmentFailure | ConfigError:
    status = error.status or 0
    if not status:  # TLS
        return _no_answer("", str(error.reason))
    text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        found = json.loads(text)
        answer = found if isinstance(found, dict) else {}
    except ValueError:
        answer = {}
    message = next((answer[key] for key in ("message", "error") if isinstance(answer.get(key), str)), text)
    said = f"{status} {error.reason}: {printable(masked(message))[:SHOWN]}"
    if status == 429 or status >= 500:
        return Unreachable(f"Kubeflow Pipelines is not ready: {said}. It may be starting; try again in a minute")
    if status == 400 and answer:
        return ConfigError(f"Kubeflow Pipelines refused the request: {said}")
    kind = NotFound if status == 404 and answer else EnvironmentFailure
    advice = "" if kind is NotFound else f". {ADVICE.get(status, WAY_IN)}"
    return kind(f"Kubeflow Pipelines refused the request: {said}{advice}")


# ------------------------------------------------------------------------------------------------------ objects
def pages(ask: Callable[..., Any], field: str, **arguments: Any) -> Iterator[Any]:
    """Yield all items of a list. `ask`: a method of the client that takes `page_token` and `page_size`."""
    token = ""
    while True:
        page = ask(page_token=token, page_size=100, **arguments)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return


def equal(key: str, value: str, operation: str = "EQUALS") -> str:
    """Return a filter of the API."""
    return json.dumps({"predicates": [{"operation": operation, "key": key, "stringValue": value}]})


def link(host: str | None, page: str, id: str) -> str:
    """Return the address of a page in the UI; empty if the UI's address is not known."""
    ui = masked(os.environ.get(UI_ENDPOINT) or host or os.environ.get(ENDPOINT) or "").rstrip("/")
    ui = ui if not ui or "://" in ui else f"https://{ui}"
    return f"{ui}/#/{page}/details/{id}" if ui else ""


def parameters_of(client: Any, run: Any) -> dict[str, Any]:
    """Return a run's parameters: the given ones, and the defaults of its pipeline if the server has them."""
    given: dict[str, Any] = (run.runtime_config and run.runtime_config.parameters) or {}
    spec, version = run.pipeline_spec, run.pipeline_version_reference
    if not spec and version is not None:
        with contextlib.suppress(FlexfleetError), translated():
            spec = client.get_pipeline_version(version.pipeline_id, version.pipeline_version_id).pipeline_spec
    spec = _in(spec, "pipeline_spec") or spec  # beside the platform's specification, if there is one
    form = _in(spec, "root", "inputDefinitions", "parameters")
    return {**{name: _in(form, name).get("defaultValue") for name in form}, **given}


def _in(value: Any, *keys: str) -> dict[str, Any]:
    """Return the object at the end of these keys; empty if it does not exist."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}

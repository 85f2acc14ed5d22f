"""Connect to Kubeflow Pipelines through its SDK. Requests have timeouts, and error messages contain advice."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, EnvironmentFailure, Unreachable, first_line, masked, printable
from fl_engine.core.text import is_http
from fl_engine.storage.proxies import proxy_of

ENDPOINT, UI_ENDPOINT = "KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT"
TIMEOUT_S = (10.0, 60.0)
"""Timeouts in seconds for connecting and for receiving data. A timeout is needed because a port-forward to a deleted
pod accepts requests but never responds."""
SHOWN = 300
"""Maximum number of characters of a server's message that an error quotes."""

PORT_FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"
WAY_IN = f"For a Kubeflow in a cluster, run `{PORT_FORWARD}` and use --host http://localhost:8080"
LOG_IN = f"The SDK's credentials are missing or have expired: log in again, or bypass the login page. {WAY_IN}"
ADVICE = {
    401: LOG_IN,
    403: "The credentials do not allow this. If Kubeflow has several users, --namespace must name your profile",
    404: f"Check the path in --host; Kubeflow Pipelines must be version 2. {WAY_IN}",
}


@contextlib.contextmanager
def connected(host: str | None, timeout_s: tuple[float, float] = TIMEOUT_S) -> Iterator[Any]:
    """Yield the SDK's `kfp.Client`, and translate errors from its calls (see `translated`). If `host` is None, the SDK
    gets the address from KF_PIPELINES_ENDPOINT, the pod's environment, or KUBECONFIG. Raises ConfigError if the address
    is missing or malformed."""
    check_host(host, "--host") if host else check_host(os.environ.get(ENDPOINT, ""), ENDPOINT)
    kubeconfig = os.environ.get("KUBECONFIG") or Path(os.path.expanduser("~/.kube/config")).is_file()
    if not (host or os.environ.get(ENDPOINT) or os.environ.get("KUBERNETES_SERVICE_HOST") or kubeconfig):
        raise ConfigError(f"The address of Kubeflow Pipelines is not set. Use --host or {ENDPOINT}. {WAY_IN}")
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it logs every attempt
    with translated():
        with without_links(), warnings.catch_warnings():
            for kind in (FutureWarning, UserWarning):  # hide the warnings about Kubeflow 2 and about adding https://
                warnings.simplefilter("ignore", kind)
            client = _client(host, timeout_s)
        yield client


def without_links() -> contextlib.redirect_stdout[io.StringIO]:
    """Hide the links that the SDK prints when it creates a pipeline, an experiment or a run."""
    return contextlib.redirect_stdout(io.StringIO())


def _client(host: str | None, timeout_s: tuple[float, float]) -> Any:
    import kfp
    import urllib3
    from kfp_server_api import ApiException

    class Client(kfp.Client):  # type: ignore[misc]
        def _load_config(self, *args: Any) -> Any:
            """Configure the proxy from environment variables such as HTTPS_PROXY, which the SDK ignores."""
            config = super()._load_config(*args)
            if proxy := proxy_of(config.host):
                config.proxy, config.proxy_headers = proxy["proxy_url"], proxy["proxy_headers"]
            return config

        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            """Set a timeout for all requests, and check the server once. This method replaces the SDK's check, which
            tries five times and logs tracebacks."""
            rest = api_of(self).rest_client
            request = rest.request
            rest.request = lambda *args, **more: request(*args, **more | {"_request_timeout": timeout_s})
            return self._healthz_api.healthz_service_get_healthz()

    try:
        client = Client(host=host)
    except (ApiException, urllib3.exceptions.HTTPError, ConfigError):
        raise
    except Exception as error:  # the SDK may fail to read a file or to request a token
        raise EnvironmentFailure(
            f"The SDK of Kubeflow Pipelines cannot connect: {type(error).__name__}: {first_line(error)}. Check the "
            "variables KF_PIPELINES_* and KUBECONFIG"
        ) from error
    if client.get_kfp_healthz().multi_user is None:
        raise EnvironmentFailure(f"--host or {ENDPOINT} must be the address of a Kubeflow Pipelines API. {LOG_IN}")
    return client


def api_of(client: Any) -> Any:
    """Return the SDK's `kfp_server_api.ApiClient`, for calls that `kfp.Client` does not support."""
    return client._run_api.api_client


def check_host(address: str, name: str) -> None:
    """Raise ConfigError for a malformed address. `name`: the option or variable that contains the address."""
    good = is_http(address if "://" in address else f"https://{address}")  # the SDK also adds https://
    if address and not (good and address.isprintable() and set(address).isdisjoint(" ?#")):
        raise ConfigError(
            f"{name} must be the address of Kubeflow Pipelines, such as http://localhost:8080, without a query (?) or "
            f"fragment (#), got {masked(address)!r}"
        )


@contextlib.contextmanager
def translated(*untranslated: type[Exception]) -> Iterator[None]:
    """Translate errors from the SDK's calls. Raises Unreachable if the server does not respond or is not ready, and
    ConfigError if the server rejects a value. Raises EnvironmentFailure for other rejected requests."""
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
        raise _unreachable(where, str(getattr(error, "reason", None) or error)) from error


def _unreachable(where: str, reason: str) -> Unreachable:
    last = printable(masked(reason).rpartition(": ")[2].strip("'\")>"))
    return Unreachable(f"Kubeflow Pipelines{where} cannot be reached: {last}. {WAY_IN}")


def _refused(error: Any) -> EnvironmentFailure | ConfigError:
    status = error.status or 0
    if not status:  # an error in TLS
        return _unreachable("", str(error.reason))
    text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    is_of_api = isinstance(found, dict)
    message = str(found.get("message") or found.get("error") or text) if is_of_api else text
    reason = f"{status} {error.reason}: {printable(masked(message))[:SHOWN]}"
    if status == 429 or status >= 500:
        return Unreachable(f"Kubeflow Pipelines is not ready: {reason}. It may be starting; try again in a minute")
    if status == 400 and is_of_api:
        return ConfigError(f"Kubeflow Pipelines rejected the request: {reason}")
    advice = "" if status == 404 and is_of_api else f". {ADVICE.get(status, WAY_IN)}"
    return EnvironmentFailure(f"Kubeflow Pipelines rejected the request: {reason}{advice}")


def pages(request: Callable[..., Any], field: str, **arguments: Any) -> Iterator[Any]:
    """Yield all items of a paginated list. `request`: client method with parameters `page_token` and `page_size`."""
    token: str | None = ""
    while token is not None:
        page = request(page_token=token, page_size=100, **arguments)
        yield from getattr(page, field) or []
        token = page.next_page_token or None


def link(host: str | None, page: str, id: str) -> str:
    """Return the URL of a page in the UI. The result is empty if the URL of the UI is unknown."""
    ui = masked(os.environ.get(UI_ENDPOINT) or host or os.environ.get(ENDPOINT) or "").rstrip("/")
    ui = ui if not ui or "://" in ui else f"https://{ui}"
    return f"{ui}/#/{page}/details/{id}" if ui else ""


def parameters_of(client: Any, run: Any) -> dict[str, Any]:
    """Return the parameters of a run. Defaults of its pipeline are included if the server still has the pipeline."""
    given: dict[str, Any] = (run.runtime_config and run.runtime_config.parameters) or {}
    spec, version = run.pipeline_spec or {}, run.pipeline_version_reference
    if not spec and version is not None:
        with contextlib.suppress(ConfigError, EnvironmentFailure), translated():
            spec = client.get_pipeline_version(version.pipeline_id, version.pipeline_version_id).pipeline_spec or {}
    spec = spec.get("pipeline_spec") or spec  # nested under this key if Kubernetes settings exist
    form = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {})
    return {**{name: about.get("defaultValue") for name, about in form.items()}, **given}

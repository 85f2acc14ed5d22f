"""Calls the Kubernetes API through the official client; `k8s/base/role.yaml` grants exactly the calls made here.

Requests are retried for about a minute. Lists are polled and not watched, because a watch can be dropped.

`kubernetes` and `tenacity` are imported inside functions, because devices import this module and do not have them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import urllib3

from fl_engine.core.errors import EnvironmentFailure, Unreachable, certificate_hint, printable

log = logging.getLogger("flexfleet")

Resource = dict[str, Any]

TRIES = 9
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
"""Seconds before the second try, which double before each further try, and the longest wait before a try."""
QUOTA = "exceeded quota"
"""Part of the API's message if a ResourceQuota is full."""
NOUNS = {"configmaps": "config_map", "events": "event", "jobs": "job", "pods": "pod", "secrets": "secret"}
"""Map each kind to its name in the client's methods, as in `list_namespaced_job`."""
TRANSPORT_ERRORS = (urllib3.exceptions.HTTPError, OSError, ValueError)
"""Errors of a connection, and the ValueError of a response that is not a JSON object."""
WARNING = re.compile(r'299 [^"]*"((?:[^"\\]|\\.)*)"')
"""Text of a warning in the header Warning, as in `299 - "text"`."""


class Refusal(Exception):
    """A response with an error status, made from the client's ApiException. A TLS error has the status 0."""

    def __init__(self, error: Any) -> None:
        status: Resource = {}
        with suppress(ValueError):
            status = _object(error.body)
        self.status: int = error.status
        self.message = printable(status.get("message") or error.reason or "")[:500]
        untrusted = "CERTIFICATE_VERIFY_FAILED" in self.message
        conflict = error.status == 409 and status.get("reason") != "AlreadyExists"
        self.busy = conflict or error.status == 429 or error.status >= 500 or (error.status == 0 and not untrusted)
        """Whether the API cannot process the request now. A conflict is a concurrent change of the same object."""
        self.unauthenticated = error.status == 401 or "system:anonymous" in self.message
        """Whether the API does not accept the credentials."""
        super().__init__(f"HTTP {self.status} {self.message}" if self.status else self.message)


class Cluster:
    """Reads and writes the objects of one namespace as plain JSON.

    Every method raises EnvironmentFailure if the API refuses the request or cannot be reached.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._client: Any = None
        self._warned: set[str] = set()
        self._accepted = False
        """Whether the API has accepted the credentials before."""

    def create(self, kind: str, body: Resource) -> Resource | None:
        """Create an object. Return None if an object of that name exists already."""
        return self._call("create", kind, absent=409, body=body)

    def get(self, kind: str, name: str) -> Resource | None:
        """Return an object; None if it does not exist."""
        return self._call("read", kind, absent=404, name=name)

    def patch(self, kind: str, name: str, body: Resource) -> Resource | None:
        """Change these fields of an object. Return None if it does not exist."""
        return self._call("patch", kind, absent=404, name=name, body=body)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and all objects that it owns, if it exists."""
        self._call("delete", kind, absent=404, name=name, propagation_policy="Background")

    def select(
        self, kind: str, labels: Mapping[str, str], fields: Mapping[str, str] = MappingProxyType({})
    ) -> list[Resource]:
        """Return all objects that have these labels and fields."""
        given = {"label_selector": labels, "field_selector": fields}
        query = {name: ",".join(f"{k}={v}" for k, v in pairs.items()) for name, pairs in given.items() if pairs}
        for _ in range(TRIES):
            items: list[Resource] = []
            more = None
            # Status 410 means that the rest of the list has expired, so the list is read again from its start.
            while page := self._call("list", kind, absent=410 if more else 0, limit=500, _continue=more, **query):
                items += page.get("items", [])
                more = page.get("metadata", {}).get("continue")
                if not more:
                    return items
        raise Unreachable(f"the Kubernetes API cannot list all {kind}: the rest of the list expired {TRIES} times")

    def _call(self, verb: str, kind: str, *, absent: int, **arguments: Any) -> Resource | None:
        """Call the API with retries. Return None if the response has the status `absent`."""
        import tenacity

        what = f"{verb} {kind} {arguments.get('name', '')}".rstrip()

        def log_retry(state: Any) -> None:
            error = state.outcome.exception()
            log.warning("the Kubernetes API: %s (%s); retrying in %.1f s", error, what, state.upcoming_sleep)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(TRIES),
            wait=tenacity.wait_exponential(FIRST_WAIT_S, LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception(self._is_transient),
            before_sleep=log_retry,
            reraise=True,
        )
        try:
            return retrying(self._send, verb, kind, arguments)
        except (Refusal, *TRANSPORT_ERRORS) as error:
            if not isinstance(error, Refusal) or error.busy:
                raise Unreachable(f"the Kubernetes API is unavailable: {error} ({what})") from error
            if error.status == absent:
                return None
            raise EnvironmentFailure(f"Kubernetes: cannot {what}: {error}{_hint(error, self.namespace)}") from None

    def _send(self, verb: str, kind: str, arguments: dict[str, Any]) -> Resource:
        from kubernetes.client import ApiException, BatchV1Api, CoreV1Api

        try:
            self._client = self._client or _connect()
            api = BatchV1Api(self._client) if kind == "jobs" else CoreV1Api(self._client)
            response = getattr(api, f"{verb}_namespaced_{NOUNS[kind]}")(
                namespace=self.namespace, _preload_content=False, _request_timeout=(10, 60), **arguments
            )
            found = _object(response.data)
        except ApiException as error:
            refusal = Refusal(error)
            if refusal.unauthenticated:
                self._client = None  # The next try loads the credentials again, because they may have expired.
            raise refusal from None
        self._accepted = True
        self._log_warnings(response.headers.getlist("Warning"))
        return found

    def _is_transient(self, error: BaseException) -> bool:
        """Whether the next try can succeed.

        A quota can be full for a moment. Credentials that were accepted before can have expired shortly before their
        renewal. A create whose connection broke may have succeeded; the next try then returns 409 AlreadyExists.
        """
        if not isinstance(error, Refusal):
            return isinstance(error, TRANSPORT_ERRORS)
        return error.busy or QUOTA in error.message or (error.unauthenticated and self._accepted)

    def _log_warnings(self, headers: list[str]) -> None:
        """Log each warning of the API once, such as an unknown field or a violation of Pod Security."""
        for text in (found for header in headers for found in WARNING.findall(header)):
            if text not in self._warned:
                self._warned.add(text)
                log.warning("the Kubernetes API warns: %s", printable(text))


def _connect() -> Any:
    """Return an ApiClient for the cluster in which this process runs, or for the cluster of KUBECONFIG."""
    import kubernetes
    import requests
    import yaml

    class Configuration(kubernetes.client.Configuration):  # type: ignore[misc]
        def get_api_key_with_prefix(self, identifier: str) -> str:
            """Return the token without the newline at the end of its file, which a header must not contain."""
            return (super().get_api_key_with_prefix(identifier) or "").strip()

    config = Configuration()
    config.retries = False
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            kubernetes.config.load_incluster_config(config)
        else:
            # The package reads KUBECONFIG when it is imported. Its value may have changed since then.
            kubernetes.config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=config)
    except (requests.ConnectionError, requests.Timeout):
        raise  # The server to which KUBECONFIG's user signs in is unreachable, which is transient.
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError) as error:
        raise EnvironmentFailure(
            f"no cluster: {' '.join(str(error).split())}. run.backend=kubernetes uses the cluster in which it runs, or "
            "that of KUBECONFIG"
        ) from error
    client = kubernetes.client.ApiClient(config)
    client.user_agent = "flexfleet"
    return client


def _object(data: bytes | None) -> Resource:
    """Return the JSON object of a response. Raises ValueError if the response does not hold one."""
    with suppress(ValueError):
        found = json.loads(data or b"")
        if isinstance(found, dict):
            return found
    raise ValueError(f"expected a JSON object, got {printable((data or b'')[:100].decode(errors='replace'))!r}")


def _hint(refusal: Refusal, namespace: str) -> str:
    """Return what to do about a refused request; empty if the API's message says it."""
    if refusal.status == 0:
        return certificate_hint(refusal.message) or ". Is certificate-authority-data in KUBECONFIG this cluster's?"
    if refusal.unauthenticated:
        return ". Check the credentials in KUBECONFIG; a token or certificate may have expired"
    if QUOTA in refusal.message:
        return ". Raise the quota (k8s/base/quota.yaml), or delete what earlier runs have left"
    if refusal.status == 403 and " denied" not in refusal.message:
        return f". The service account needs the rights of k8s/base/role.yaml in the namespace {namespace}"
    return f". Does the namespace {namespace} exist (kubernetes.namespace)?" if refusal.status == 404 else ""

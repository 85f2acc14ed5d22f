"""The few calls of the Kubernetes API that running clients takes; `k8s/base/role.yaml` grants exactly these.

An API server that is busy or restarting (429, 5xx, a broken connection) is asked again for a minute or so. Nothing is
watched: a list that is asked for again cannot be dropped.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import urllib3

from fl_engine.errors import EnvironmentFailure, certificate_hint, printable

log = logging.getLogger("flexfleet")

Resource = dict[str, Any]

WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
TRIES = 8
FIRST_WAIT_S = 0.5
PATHS = {
    "configmaps": "/api/v1/namespaces/{namespace}/configmaps",
    "events": "/api/v1/namespaces/{namespace}/events",
    "jobs": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "secrets": "/api/v1/namespaces/{namespace}/secrets",
}


class Cluster:
    """One namespace of a cluster, as plain JSON. Raises EnvironmentFailure for what is refused (which right is missing)
    or cannot be reached."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._made: Any = None
        self._warned: set[str] = set()

    @property
    def _client(self) -> Any:
        if self._made is None:
            self._made = _connect()
        return self._made

    def create(self, kind: str, body: Resource) -> Resource | None:
        """None: something of that name is there already."""
        return self._ask("POST", kind, body=body, missing=409)

    def get(self, kind: str, name: str) -> Resource | None:
        return self._ask("GET", kind, name, missing=404)

    def delete(self, kind: str, name: str) -> None:
        """With all that it owns. That nothing is there is no error."""
        self._ask("DELETE", kind, name, body={"propagationPolicy": "Background"}, missing=404)

    def select(
        self, kind: str, labels: Mapping[str, str], fields: Mapping[str, str] = MappingProxyType({})
    ) -> list[Resource]:
        """All that carry these labels, and whose fields are these."""
        items: list[Resource] = []
        given = {"labelSelector": labels, "fieldSelector": fields}
        query = [(name, ",".join(f"{k}={v}" for k, v in pairs.items())) for name, pairs in given.items() if pairs]
        more = ""
        while True:
            found = self._ask("GET", kind, query=[*query, ("limit", "500"), *([("continue", more)] if more else [])])
            items += (found or {}).get("items", [])
            more = (found or {}).get("metadata", {}).get("continue") or ""
            if not more:
                return items

    def _ask(
        self,
        method: str,
        kind: str,
        name: str = "",
        *,
        body: Resource | None = None,
        query: list[tuple[str, str]] | None = None,
        missing: int = 0,
    ) -> Resource | None:
        from kubernetes.client.exceptions import ApiException

        path = PATHS[kind].format(namespace=self.namespace) + (f"/{name}" if name else "")
        for attempt in range(TRIES):
            try:
                answer = self._client.call_api(
                    path,
                    method,
                    query_params=query or [],
                    header_params={"Accept": "application/json", "Content-Type": "application/json"},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _return_http_data_only=True,
                    _request_timeout=(10, 60),
                )
                self._tell_warnings(answer.headers.getlist("Warning"))
                found: Resource = json.loads(answer.data)
                return found
            except ApiException as error:
                if error.status == missing:
                    return None
                # A create that was cut off may have succeeded: the next try says 409, which is what it means.
                if error.status != 429 and 0 < (error.status or 0) < 500:  # 0: the connection was cut within TLS
                    raise EnvironmentFailure(_why(error, method, kind, name, self.namespace)) from None
                said = f"HTTP {error.status}" if error.status else str(error.reason)
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                said = str(error)
            if attempt + 1 < TRIES:
                wait = FIRST_WAIT_S * 2**attempt * (1 + random.random() / 4)
                log.warning("the Kubernetes API: %s (%s %s); asking again in %.1f s", said, method, path, wait)
                time.sleep(wait)
        raise EnvironmentFailure(
            f"the Kubernetes API does not answer: {said} ({method} {path}){certificate_hint(said)}"
        )

    def _tell_warnings(self, headers: Iterable[str]) -> None:
        """What the API server warns of (`299 - "..."`), e.g. a level of Pod Security that is not enforced, once."""
        for text in (re.sub(r"\\(.)", r"\1", m[1]) for header in headers for m in WARNING.finditer(header)):
            if text not in self._warned:
                self._warned.add(text)
                log.warning("the Kubernetes API warns: %s", printable(text))


def _connect() -> Any:
    import kubernetes

    config = kubernetes.client.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            kubernetes.config.load_incluster_config(config)
        else:
            # The package looks at KUBECONFIG when it is imported; what counts is what it says now.
            kubernetes.config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=config)
    except kubernetes.config.ConfigException as error:
        raise EnvironmentFailure(
            f"no cluster: {error}. run.backend=kubernetes takes the cluster that it runs in, else KUBECONFIG's"
        ) from error
    config.retries = False
    return kubernetes.client.ApiClient(config)


def _why(error: Any, method: str, kind: str, name: str, namespace: str) -> str:
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason
    hint = ""
    if error.status in (401, 403):
        hint = f". The service account needs the rights of k8s/base/role.yaml in the namespace {namespace}"
    elif error.status == 404:
        hint = f". Is there a namespace {namespace}? (kubernetes.namespace)"
    return f"Kubernetes refuses to {method} {kind} {name}: {error.status} {said}{hint}"



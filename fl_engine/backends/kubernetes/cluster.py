"""The few calls of the Kubernetes API that running clients takes; `k8s/base/role.yaml` grants exactly these.

A request is repeated for about a minute where the API server is busy or restarting (429, 5xx, a broken connection),
and for what may pass: another change of the same object (409 Conflict, as of a quota that several creations count), a
full quota, and credentials that were good before and are not renewed yet. Where the server says when it wants to be
asked again (Retry-After), a try is put off until then, by LONGEST_WAIT_S at most.
Lists are polled, not watched: a watch can be dropped, a list that is asked for again cannot.

Of the package `kubernetes` only the loading of configuration is used (KUBECONFIG, a pod's account, plug-ins that fetch
credentials): its calls differ between versions. Requests go through urllib3.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import urllib3

from fl_engine.core.errors import EnvironmentFailure, Unreachable, certificate_hint, printable

log = logging.getLogger("flexfleet")

Resource = dict[str, Any]

TRIES = 8
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
"""Seconds before the second try, and the most that one try is put off because of Retry-After."""
QUOTA = "exceeded quota"
"""What the API says where a ResourceQuota is full."""
PATHS = {
    "configmaps": "/api/v1/namespaces/{namespace}/configmaps",
    "events": "/api/v1/namespaces/{namespace}/events",
    "jobs": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "secrets": "/api/v1/namespaces/{namespace}/secrets",
}

WARNING = re.compile(r'299 [^"]*"((?:[^"\\]|\\.)*)"')
"""The text of the header Warning's values: `299 - "text"`, with commas between several."""
POLICY = re.compile(r"admission webhook .* denied|ValidatingAdmissionPolicy .* denied")


class Cluster:
    """One namespace of a cluster, as plain JSON. Raises EnvironmentFailure for what is refused (which right is missing)
    or cannot be reached."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._made: tuple[urllib3.PoolManager, Any] | None = None
        self._warned: set[str] = set()
        self._known = False
        """Whether the server has taken the credentials before."""

    def create(self, kind: str, body: Resource) -> Resource | None:
        """None where an object of that name is there already."""
        return self._ask("POST", kind, body=body, missing=409)

    def get(self, kind: str, name: str) -> Resource | None:
        return self._ask("GET", kind, name, missing=404)

    def delete(self, kind: str, name: str) -> None:
        """Deletes the object and all that it owns; an object that is not there is no error."""
        self._ask("DELETE", kind, name, body={"propagationPolicy": "Background"}, missing=404)

    def select(
        self, kind: str, labels: Mapping[str, str], fields: Mapping[str, str] = MappingProxyType({})
    ) -> list[Resource]:
        """All that carry these labels, and whose fields are these."""
        items: list[Resource] = []
        given = {"labelSelector": labels, "fieldSelector": fields}
        query = [(name, ",".join(f"{k}={v}" for k, v in pairs.items())) for name, pairs in given.items() if pairs]
        more, tries = "", TRIES
        while True:
            asked = [*query, ("limit", "500"), *([("continue", more)] if more else [])]
            found = self._ask("GET", kind, query=asked, missing=410 if more else 0)
            if found is None:  # the rest of an old list is no longer there
                items, more, tries = [], "", tries - 1
                if not tries:
                    raise Unreachable(f"the Kubernetes API does not give all {kind}: what is left is too old each time")
                continue
            items += found.get("items", [])
            more = found.get("metadata", {}).get("continue") or ""
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
        path = PATHS[kind].format(namespace=self.namespace) + (f"/{name}" if name else "")
        for attempt in range(TRIES):
            wait = FIRST_WAIT_S * 2**attempt * (1 + random.random() / 4)
            try:
                answer = self._send(method, path, body, query or [])
                self._log_warnings(answer)
                if answer.status < 300:
                    found = _object(answer)
                    self._known = True
                    return found
                conflict = answer.status == 409 and _status(answer).get("reason") != "AlreadyExists"
                if answer.status == missing and not conflict:
                    return None
                said = f"HTTP {answer.status} {_message(answer)}"
                # A create that was cut off may have succeeded; the next try then answers 409, as it should.
                if answer.status != 429 and answer.status < 500 and not conflict:
                    unknown = _asks_who(answer)
                    may_pass = QUOTA in said or (unknown and self._known)
                    if not may_pass or attempt + 1 == TRIES:
                        raise EnvironmentFailure(_why(answer, method, kind, name, self.namespace))
                    if unknown:
                        self._made = None  # the credentials may have run out since they were loaded
                wait = max(wait, min(LONGEST_WAIT_S, _retry_after(answer)))
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                _raise_if_untrusted(error)
                said = str(error)
            if attempt + 1 < TRIES:
                log.warning("the Kubernetes API: %s (%s %s); asking again in %.1f s", said, method, path, wait)
                time.sleep(wait)
        raise Unreachable(f"the Kubernetes API gives no good answer: {said} ({method} {path})")

    def _send(
        self, method: str, path: str, body: Resource | None, query: list[tuple[str, str]]
    ) -> urllib3.BaseHTTPResponse:
        if self._made is None:
            self._made = _connect()
        pool, config = self._made
        headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "flexfleet"}
        if token := _token(config):
            headers["Authorization"] = token
        return pool.request(
            method,
            config.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else ""),
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            retries=False,
            timeout=urllib3.Timeout(connect=10, read=60),
        )

    def _log_warnings(self, answer: urllib3.BaseHTTPResponse) -> None:
        """Logs each of the server's warnings once (an unknown field, a pod that Pod Security would refuse)."""
        for header in answer.headers.getlist("Warning"):
            for text in (re.sub(r"\\(.)", r"\1", said) for said in WARNING.findall(header)):
                if text not in self._warned:
                    self._warned.add(text)
                    log.warning("the Kubernetes API warns: %s", printable(text))


def _connect() -> tuple[urllib3.PoolManager, Any]:
    """Connections to the cluster's API server, and the configuration that they were made from."""
    import certifi
    import kubernetes
    import yaml
    from requests.exceptions import RequestException
    from requests.utils import should_bypass_proxies

    config = kubernetes.client.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            kubernetes.config.load_incluster_config(config)
        else:
            # The package reads KUBECONFIG when it is imported; its value may have changed since.
            kubernetes.config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=config)
    except kubernetes.config.ConfigException as error:
        raise EnvironmentFailure(
            f"no cluster: {str(error).rstrip('.')}. run.backend=kubernetes takes the cluster that it runs in, else "
            "KUBECONFIG's"
        ) from error
    except (yaml.YAMLError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, RequestException) and not isinstance(error, ValueError):
            raise  # where KUBECONFIG says to sign in: it passes
        said = " ".join(str(error).split())
        raise EnvironmentFailure(
            f"no cluster: KUBECONFIG cannot be read, where the YAML of a kubectl configuration is expected: {said}"
        ) from error
    try:
        trust = ssl.create_default_context(cafile=config.ssl_ca_cert or certifi.where())
        if not config.verify_ssl:
            trust.check_hostname = False
            trust.verify_mode = ssl.CERT_NONE
        if config.cert_file:
            trust.load_cert_chain(config.cert_file, config.key_file)
    except OSError as error:  # SSLError is one
        files = ", ".join(str(file) for file in (config.ssl_ca_cert, config.cert_file, config.key_file) if file)
        raise EnvironmentFailure(
            f"no cluster: its certificates cannot be read: {error}. Expected PEM files that belong together: {files}"
        ) from error
    settings: dict[str, Any] = {"ssl_context": trust, "server_hostname": config.tls_server_name, "maxsize": 4}
    if config.proxy and not should_bypass_proxies(config.host, no_proxy=config.no_proxy or ""):
        return urllib3.ProxyManager(config.proxy, proxy_headers=config.proxy_headers, **settings), config
    return urllib3.PoolManager(**settings), config


def _token(config: Any) -> str:
    """The value of the header Authorization, refreshed where it has run out; empty: a certificate says who asks."""
    if config.refresh_api_key_hook is not None:
        config.refresh_api_key_hook(config)
    # `authorization` up to version 36 of the package, `BearerToken` from 37.
    token = config.api_key.get("BearerToken") or config.api_key.get("authorization") or ""
    return str(token).strip()


def _raise_if_untrusted(error: BaseException) -> None:
    """A certificate that is refused is refused again: EnvironmentFailure."""
    cause = error.args[0] if error.args and isinstance(error, urllib3.exceptions.SSLError) else error
    if not isinstance(cause, ssl.SSLCertVerificationError):
        return
    hint = certificate_hint(cause.verify_message) or ". Is certificate-authority-data in KUBECONFIG this cluster's?"
    raise EnvironmentFailure(f"the Kubernetes API's certificate is refused: {cause.verify_message}{hint}") from None


def _retry_after(answer: urllib3.BaseHTTPResponse) -> float:
    """The seconds after which the server wants to be asked again; 0: it does not say."""
    try:
        return urllib3.Retry().get_retry_after(answer) or 0.0
    except urllib3.exceptions.InvalidHeader:
        return 0.0


def _object(answer: urllib3.BaseHTTPResponse) -> Resource:
    """Raises ValueError where the answer holds none."""
    with suppress(ValueError):
        found = json.loads(answer.data)
        if isinstance(found, dict):
            return found
    said = printable(answer.data[:100].decode(errors="replace"))
    raise ValueError(f"a JSON object is expected, got {said!r}")


def _status(answer: urllib3.BaseHTTPResponse) -> Resource:
    """The Status that the API says a refusal with; empty: it is none."""
    try:
        return _object(answer)
    except ValueError:
        return {}


def _message(answer: urllib3.BaseHTTPResponse) -> str:
    return printable(_status(answer).get("message") or answer.reason or "")[:500]


def _asks_who(answer: urllib3.BaseHTTPResponse) -> bool:
    """Whether the API does not know who asks."""
    return answer.status == 401 or "system:anonymous" in _message(answer)


def _why(answer: urllib3.BaseHTTPResponse, method: str, kind: str, name: str, namespace: str) -> str:
    said = _message(answer)
    hint = ""
    if _asks_who(answer):
        hint = ". It does not know who asks: has the token or certificate run out, or has KUBECONFIG's user none?"
    elif answer.status == 403 and QUOTA in said:
        hint = ". Raise the quota (k8s/base/quota.yaml), or delete what is over"
        if "count/secrets" in said:
            hint += ": of each run that gets no more rounds the Secret <run>-keys"
        elif "count/jobs" in said:
            hint += ": Jobs of runs that have stopped. With kubernetes.placement=device each device has a Job"
    elif "is being terminated" in said:
        hint = f". Somebody deletes the namespace {namespace}: make it anew, or set kubernetes.namespace"
    elif POLICY.search(said):
        hint = ". That is a policy of the cluster's: change it, or what the Job says (kubernetes.template)"
    elif answer.status == 403:
        hint = f". The service account needs the rights of k8s/base/role.yaml in the namespace {namespace}"
    elif answer.status == 404:
        hint = f". Is there a namespace {namespace}? (kubernetes.namespace)"
    return f"Kubernetes refuses to {method} {kind} {name}: {answer.status} {said}{hint}"

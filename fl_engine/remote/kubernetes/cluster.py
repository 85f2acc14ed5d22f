"""Calls the Kubernetes API through the official client. `k8s/base/role.yaml` grants the required permissions.

The module polls lists of objects instead of watching them, because a watch can be interrupted. The functions import
`kubernetes` locally, because this module must be importable on devices without that package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import urllib3

from fl_engine.core.errors import EnvironmentFailure, Unreachable, printable
from fl_engine.storage.outage import waiting
from fl_engine.storage.proxies import proxy_of

Resource = dict[str, Any]

RETRY_S = 60.0
"""Maximum seconds for which a request is retried while the API is unavailable."""
QUOTA = "exceeded quota"
"""Substring of the API's error message for an exhausted ResourceQuota."""
WHOLE = {"nodes": "node", "reviews": "self_subject_access_review"}
"""Kinds of objects outside namespaces, like NOUNS."""
NOUNS = {"configmaps": "config_map", "events": "event", "jobs": "job", "pods": "pod", "secrets": "secret"}
"""Map each kind of object to its name in the client's methods, for example `list_namespaced_job`."""


class Cluster:
    """Reads and writes the Kubernetes objects of one namespace as plain JSON. Every method raises EnvironmentFailure if
    the API rejects the request or is unreachable."""

    def __init__(self, namespace: str, retry_s: float = RETRY_S) -> None:
        """`retry_s` is the maximum number of seconds for which a request is retried."""
        self.namespace, self._retry_s = namespace, retry_s
        self._client: Any = None
        self._accepted = False
        """True if the API has accepted the credentials at least once."""

    def create(self, kind: str, body: Resource, dry_run: bool = False) -> Resource | None:
        """Create an object. Return None if an object with this name already exists. With `dry_run`, the API checks the
        request as usual, but does not store the object."""
        return self._call("create", kind, absent=409, body=body, **({"dry_run": "All"} if dry_run else {}))

    def get(self, kind: str, name: str) -> Resource | None:
        """Return an object; None if the object does not exist."""
        return self._call("read", kind, absent=404, name=name)

    def patch(self, kind: str, name: str, body: Resource) -> Resource | None:
        """Set the fields of an object to the values in `body`. Return None if the object does not exist."""
        return self._call("patch", kind, absent=404, name=name, body=body)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and the objects that it owns. Ignore a missing object."""
        self._call("delete", kind, absent=404, name=name, propagation_policy="Background")

    def select(self, kind: str, labels: Mapping[str, str], fields: Mapping[str, str] | None = None) -> list[Resource]:
        """Return all objects with the given labels and fields."""
        given = {"label_selector": labels, "field_selector": fields or {}}
        query = {name: ",".join(f"{k}={v}" for k, v in pairs.items()) for name, pairs in given.items() if pairs}
        found: list[Resource] = (self._call("list", kind, absent=0, **query) or {}).get("items", [])
        return found

    def _call(self, verb: str, kind: str, *, absent: int, **arguments: Any) -> Resource | None:
        """Call the API, with retries. Return None if the response has the HTTP status `absent`."""
        return waiting(lambda: self._send(verb, kind, absent, arguments), self._retry_s)

    def _send(self, verb: str, kind: str, absent: int, arguments: dict[str, Any]) -> Resource | None:
        from kubernetes.client import ApiException, AuthorizationV1Api, BatchV1Api, CoreV1Api

        what = f"{verb} {kind} {arguments.get('name', '')}".rstrip()
        try:
            self._client = self._client or _connect()
            api = {"jobs": BatchV1Api, "reviews": AuthorizationV1Api}.get(kind, CoreV1Api)(self._client)
            where = {} if kind in WHOLE else {"namespace": self.namespace}
            call = getattr(api, f"{verb}_{WHOLE[kind]}" if kind in WHOLE else f"{verb}_namespaced_{NOUNS[kind]}")
            response = call(**where, _preload_content=False, _request_timeout=(10, 60), **arguments)
            found: Resource = json.loads(response.data)
            if not isinstance(found, dict):
                raise ValueError(f"the response must be a JSON object, got {found!r:.100}")
        except ApiException as error:
            refusal = self._refusal(error, what)
            if error.status == absent and not isinstance(refusal, Unreachable):
                return None
            raise refusal from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # ValueError: invalid JSON
            raise Unreachable(f"the Kubernetes API is unavailable: {error} ({what})") from error
        self._accepted = True
        return found

    def _refusal(self, error: Any, what: str) -> EnvironmentFailure:
        """Return the exception for an HTTP error status: Unreachable if a retry can succeed, for example because a
        quota is exhausted only briefly, or because credentials that worked before will be renewed. A conflict (409)
        means that another client changed the object concurrently. However, 409 AlreadyExists can mean that the
        connection broke after an earlier attempt created the object. A TLS error has the status 0."""
        status: Resource = {}
        with suppress(ValueError, TypeError):  # a proxy's page
            status |= json.loads(error.body or "")
        message = printable(status.get("message") or error.reason or "")[:500]
        untrusted = "CERTIFICATE_VERIFY_FAILED" in message
        conflict = error.status == 409 and status.get("reason") != "AlreadyExists"
        busy = conflict or error.status == 429 or error.status >= 500 or (error.status == 0 and not untrusted)
        unauthenticated = error.status == 401 or "system:anonymous" in message
        if unauthenticated:
            self._client = None  # the next attempt reloads the credentials
        hint = ""
        if unauthenticated or untrusted:
            hint = ". Check the credentials in KUBECONFIG; a token or certificate may have expired"
        elif QUOTA in message:
            hint = ". Raise the quota (k8s/base/quota.yaml), or delete the objects of earlier runs"
        elif error.status in (403, 404):
            hint = f". Create the namespace {self.namespace}, and grant the rights of k8s/base/role.yaml"
        transient = busy or QUOTA in message or (unauthenticated and self._accepted)
        kind = Unreachable if transient else EnvironmentFailure
        return kind(f"the Kubernetes API refuses to {what}: HTTP {error.status} {message}{hint}")


def _connect() -> Any:
    """Return a client for the cluster of this process, or for the cluster in KUBECONFIG."""
    import kubernetes
    import yaml

    config = kubernetes.client.Configuration()
    config.retries = False
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            kubernetes.config.load_incluster_config(config)
        else:  # pass KUBECONFIG's current value, because the package reads the variable only during import
            kubernetes.config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=config)
            if not config.proxy and (proxy := proxy_of(config.host)):
                config.proxy, config.proxy_headers = proxy["proxy_url"], proxy["proxy_headers"]
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError) as error:
        raise EnvironmentFailure(f"no cluster: {' '.join(str(error).split())}. Set KUBECONFIG") from error
    client = kubernetes.client.ApiClient(config)
    client.user_agent = "flexfleet"
    return client

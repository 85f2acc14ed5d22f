"""How Kubeflow's API is asked through its SDK: each question within a bound of time and of bytes. No redirect is
followed, so that credentials stay with the host that was asked; what may make something twice is never asked twice; an
answer is what the published models say, or an error in one line.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fl_engine.core.errors import ConfigError, EnvironmentFailure, Unreachable, certificate_hint, masked, printable
from flexfleet.kubeflow.shapes import misfit

CONNECT_S = 10.0
ANSWER_S = 60.0
"""Seconds that a question may take from its first byte to the answer's last, whatever the server sends meanwhile: a
port-forward whose pod is gone may take requests and never answer."""
MOST = 64 * 2**20
"""Bytes of an answer: a page of a hundred runs with their tasks has a few millions."""
SHOWN = 300
"""Characters of what a server says that are shown."""
API = "/apis/"
PORT_FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"
WAY_IN = f"Where it is in a cluster, type `{PORT_FORWARD}`, leave that open, and give --host http://localhost:8080"
LOG_IN = f"the SDK's credentials are missing or have expired: log in anew, or go past what asks for them. {WAY_IN}"
NOT_THE_API = f"Either --host has a wrong path, or this is a page to log in, as {LOG_IN}"
ADVICE = {
    401: f"It does not know who asks, as {LOG_IN}",
    403: "The credentials lack the right to this. With several users, --namespace is that of your profile",
    404: f"If it is not the API that says so, --host has a wrong path, or no Kubeflow Pipelines 2 is there. {WAY_IN}",
}
"""What to do, by the status of an answer."""
LATER = "The server starts, has too much to do, or is behind a proxy that does not reach it: try again in a minute"
INVALID = 3
NOT_FOUND = 5
"""Codes of gRPC with which the API itself refuses."""


class Undecided(Unreachable):
    """The request may have been done all the same: what it makes may be there, or come."""


class NotFound(EnvironmentFailure):
    """The API says that it does not have it."""


@dataclass(frozen=True)
class Asked:
    """A question: its method and address."""

    method: str
    url: str

    def __str__(self) -> str:
        return f"asked: {self.method} {masked(urlsplit(self.url).path)}"

    @property
    def whom(self) -> str:
        return f"Kubeflow Pipelines at {masked(self.url.partition(API)[0])}"

    def failed(self, kind: type[EnvironmentFailure], told: str) -> EnvironmentFailure:
        """An error after which a thing may have been made, if the question is to make one; else of this kind."""
        return (Undecided if self.method == "POST" else kind)(f"{self.whom}{told}")

    def broken(self, why: str, sent: bool = True) -> EnvironmentFailure:
        """`sent`: the server may have the question."""
        told = f" cannot be reached: {why} ({self}). {WAY_IN}"
        return self.failed(Unreachable, told) if sent else Unreachable(f"{self.whom}{told}")

    def not_the_api(self, arrived: str) -> EnvironmentFailure:
        told = f": what answers is not the API of Kubeflow Pipelines ({self}; arrived: {arrived}). {NOT_THE_API}"
        return self.failed(EnvironmentFailure, told)


@dataclass(frozen=True)
class Answer:
    """What the SDK reads of an answer: JSON in UTF-8."""

    asked: Asked
    data: bytes
    status: int = 200
    reason: str = "OK"

    def getheader(self, name: str, default: Any = None) -> Any:
        return "application/json" if name.lower() == "content-type" else default

    def getheaders(self) -> dict[str, str]:
        return {"content-type": "application/json"}


class Pool:
    """Stands for the SDK's pool of connections, of which the SDK uses this method only."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def request(self, method: str, url: str, **given: Any) -> Answer:
        """Raises ConfigError for an address that is none and for a value that the API refuses, NotFound, Undecided,
        Unreachable, and EnvironmentFailure for any other answer than an object in JSON."""
        asked, got = Asked(method, url), dict[str, Any]()
        # A thread: the time of a socket is that of each read, and a name may be looked up without end.
        asking = threading.Thread(target=_ask, args=(self._pool, asked, given, got), daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        if "error" in got:
            raise _explained(asked, got["error"]) from got["error"]
        if "body" not in got:
            if "answer" in got:
                with contextlib.suppress(OSError, ValueError, RuntimeError):
                    got["answer"].shutdown()
            raise asked.broken(f"no whole answer within {ANSWER_S:g} s")
        return Answer(asked, _checked(asked, got["answer"], got["body"]))


def _ask(pool: Any, asked: Asked, given: dict[str, Any], got: dict[str, Any]) -> None:
    """Puts `answer` and `body`, or `error`, into `got`. A connection that breaks, as a kept one does which the server
    has closed, is made anew once, where it does no harm to ask twice."""
    from urllib3 import Timeout
    from urllib3.exceptions import ProtocolError

    timeout = Timeout(connect=CONNECT_S, read=ANSWER_S + 1)  # after which a thread that nobody waits for any more ends
    given |= {"retries": False, "redirect": False, "preload_content": False, "timeout": timeout}
    for last in (asked.method == "POST", True):
        try:
            answer = got["answer"] = pool.request(asked.method, asked.url, **given)
            body = answer.read(MOST + 1)
            if len(body) > MOST:
                answer.close()
            got["body"] = body
            return
        except Exception as error:  # raised where it was asked
            if last or not isinstance(error, ProtocolError):
                got["error"] = error
                return


def _explained(asked: Asked, error: Exception) -> Exception:
    from urllib3.exceptions import ConnectTimeoutError, LocationValueError, NewConnectionError

    if isinstance(error, LocationValueError):
        return ConfigError(f"no address of Kubeflow Pipelines (like http://localhost:8080): {masked(asked.url)!r}")
    under = error.args[-1] if error.args and isinstance(error.args[-1], Exception) else error
    told = masked(str(under)) or type(under).__name__
    why = printable(re.sub(r"\[SSL: \w+\] ", "", told).rpartition(": ")[2]) + certificate_hint(told)
    why += ". Perhaps it speaks HTTP without TLS: --host http://..." if "WRONG_VERSION_NUMBER" in told else ""
    # (An error of TLS may also come after the question.)
    return asked.broken(why, sent=not isinstance(error, ConnectTimeoutError | NewConnectionError))


def _checked(asked: Asked, answer: Any, body: bytes) -> bytes:
    """The body, if it is an object in JSON and the status says that all is well."""
    status = answer.status
    if 300 <= status < 400:
        to = printable(masked(str(answer.headers.get("Location", "")).partition("?")[0]))[:SHOWN] or "nowhere"
        raise EnvironmentFailure(
            f"{asked.whom} refused: {status}, a redirect to {to} ({asked}), which is not followed. If that is its own "
            f"address, give it with --host; if a page to log in, {LOG_IN}"
        )
    found = _object(body) if len(body) <= MOST else None
    code = (found or {}).get("code")
    said = f"{status} {printable(answer.reason or '')}{_said(found, body)} ({asked})"
    if status == 429:
        raise Unreachable(f"{asked.whom} is not ready: {said}. {LATER}")
    if status >= 500:
        raise asked.failed(Unreachable, f" is not ready: {said}. {LATER}")
    if status == 409:
        raise asked.failed(EnvironmentFailure, f" refused: {said}")
    if not 200 <= status < 300:
        if status == 400 and code == INVALID:
            raise ConfigError(f"{asked.whom} refused: {said}")
        if status == 404 and code == NOT_FOUND:
            raise NotFound(f"{asked.whom} refused: {said}")
        raise EnvironmentFailure(f"{asked.whom} refused: {said}. {ADVICE.get(status, WAY_IN)}")
    if found is None:
        raise asked.not_the_api(_arrived(answer, body))
    return body


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _said(found: dict[str, Any] | None, body: bytes) -> str:
    """What a server says, from the API's own fields where it has them."""
    told = [(found or {}).get(name) for name in ("message", "error", "error_message", "error_details")]
    text = next((each for each in told if each and isinstance(each, str)), None)
    text = body[: 4 * SHOWN].decode(errors="replace") if text is None else text
    return f": {printable(masked(text)[:SHOWN])}" if text.strip() else ""


def _arrived(answer: Any, body: bytes) -> str:
    if len(body) > MOST:
        return f"more than {MOST >> 20} MiB"
    kind = printable(answer.headers.get("Content-Type") or "no content type")[:SHOWN]
    return f"{kind}{_said(None, body) or ', nothing'}"


def bound(api: Any) -> None:
    """Puts the bounds into the SDK's `ApiClient`, once."""
    if isinstance(api.rest_client.pool_manager, Pool):
        return
    api.rest_client.pool_manager = Pool(api.rest_client.pool_manager)
    read = api.deserialize

    def deserialize(answer: Any, model: str) -> Any:
        odd = misfit(json.loads(answer.data), model)
        if odd:
            raise answer.urllib3_response.asked.not_the_api(f"{odd} in a {model}")
        return read(answer, model)

    api.deserialize = deserialize


def last_asked(client: Any) -> Asked:
    """The question that the SDK's client has asked last."""
    asked: Asked = client._run_api.api_client.last_response.urllib3_response.asked
    return asked

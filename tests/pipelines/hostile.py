"""What a server, or something before it, may do with a request in place of answering it: `Spoil`s of the stand-in."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

Answer = Callable[[], tuple[int, Any]]
Spoil = Callable[[BaseHTTPRequestHandler, Answer], None]
PAGE = b"<!doctype html><title>Log in to Your Account</title><form action=/dex/auth>"


def says(status: int, body: bytes, kind: str = "application/json", **headers: str) -> Spoil:
    def spoil(handler: BaseHTTPRequestHandler, _: Answer) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return spoil


def sends(value: Any, status: int = 200) -> Spoil:
    return says(status, json.dumps(value).encode())


def refuses(status: int, code: int, text: str) -> Spoil:
    """As the API itself does."""
    return sends({"error": text, "code": code, "message": text, "details": []}, status)


def drops(handler: BaseHTTPRequestHandler, _: Answer) -> None:
    """The connection ends before anything is done."""
    _reset(handler)


def takes_and_drops(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    """All is done, and the answer is lost."""
    answer()
    _reset(handler)


def takes_and_says(spoil: Spoil) -> Spoil:
    """All is done, and something before the server answers in its place."""

    def taken(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        answer()
        spoil(handler, answer)

    return taken


def _reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.wfile.close()
    handler.connection.close()
    handler.wfile = io.BytesIO()  # which the handler flushes


def answers(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    """As it is: after spoils that pass."""
    status, told = answer()
    says(status, json.dumps(told).encode())(handler, answer)


def raw(*pieces: bytes, every_s: float = 0.0) -> Spoil:
    """Sends bytes of its own, then closes."""

    def spoil(handler: BaseHTTPRequestHandler, _: Answer) -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                handler.wfile.write(piece)
                time.sleep(every_s)
        handler.close_connection = True

    return spoil


def without_end(first: bytes, piece: bytes, every_s: float) -> Spoil:
    def spoil(handler: BaseHTTPRequestHandler, _: Answer) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(first)
            while not handler.server.over.wait(every_s):  # type: ignore[attr-defined]
                handler.wfile.write(piece)

    return spoil


def hangs(handler: BaseHTTPRequestHandler, _: Answer) -> None:
    """Until the client goes."""
    with contextlib.suppress(OSError):
        handler.connection.recv(1)
    handler.close_connection = True


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LENGTHY = HEAD + b"Content-Length: 99999999999\r\n\r\n"


def chunks() -> Iterator[bytes]:
    yield HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    yield b'5\r\n{"a":\r\n'
    yield b"zz\r\n"


REFUSED: dict[str, tuple[Spoil, int, str]] = {
    "401": (says(401, b"Unauthorized", "text/plain"), 6, "401"),
    "401 of the API": (refuses(401, 16, "Request header error: there is no user identity header."), 6, "log in anew"),
    "403": (refuses(403, 7, "User 'x' is not authorized"), 6, "--namespace"),
    "404": (says(404, b"404 page not found", "text/plain"), 6, "wrong path"),
    "404 of the API": (refuses(404, 5, "Not Found"), 6, "404"),
    "400": (says(400, b"The plain HTTP request was sent to HTTPS port", "text/html"), 6, "HTTPS port"),
    "400 of the API": (refuses(400, 3, "Invalid input error: namespace is empty"), 2, "namespace is empty"),
    "429": (says(429, b"", Retry_After="3600"), 6, "not ready: 429"),
    "a redirect to log in": (says(302, b"", Location="https://dex.example/auth?state=s3cret"), 6, "dex.example/auth"),
    "a redirect to itself": (says(307, b"", Location="/apis/v2beta1/again"), 6, "a redirect"),
    "a redirect to nowhere": (says(301, b""), 6, "a redirect"),
}
"""By its name: a refusal after which nothing is made; the exit code, and what the error says among other things."""
UNCLEAR: dict[str, tuple[Spoil, int, str]] = {
    "500": (refuses(500, 13, "Internal Server Error"), 6, "not ready: 500"),
    "502": (says(502, b"<html>Bad Gateway</html>", "text/html"), 6, "not ready: 502"),
    "503": (says(503, b"no healthy upstream", "text/plain"), 6, "not ready: 503 .*no healthy upstream"),
    "a page to log in": (says(200, PAGE, "text/html; charset=utf-8"), 6, "text/html.*Log in to Your Account"),
    "a page in an unknown charset": (says(200, PAGE, "text/html; charset=no-such"), 6, "not the API"),
    "a page that says it is JSON": (says(200, PAGE), 6, "not the API"),
    "nothing": (says(200, b""), 6, "not the API"),
    "204": (raw(b"HTTP/1.1 204 No Content\r\n\r\n"), 6, "not the API"),
    "a list": (sends([]), 6, "not the API"),
    "a text": (sends("ok"), 6, "not the API"),
    "null": (sends(None), 6, "not the API"),
    "no UTF-8": (says(200, b'{"a": "\xff\xfe"}'), 6, "not the API"),
    "half an object": (says(200, b'{"run_id": "r'), 6, "not the API"),
    "deep JSON": (says(200, b'{"a":' + b"[" * 100_000), 6, "not the API"),
    "a number of many digits": (says(200, b'{"run_id": ' + b"9" * 10_000 + b"}"), 6, "not the API"),
    "no gzip": (says(200, b"{}", Content_Encoding="gzip"), 6, "cannot be reached"),
    "a closed connection": (drops, 6, "cannot be reached"),
    "no HTTP": (raw(b"220 smtp ready\r\n"), 6, "cannot be reached"),
    "a status that is none": (raw(b"HTTP/1.1 abc\r\n\r\n"), 6, "cannot be reached"),
    "less than announced": (raw(HEAD + b"Content-Length: 99\r\n\r\n{}"), 6, "cannot be reached"),
    "broken chunks": (raw(*chunks()), 6, "cannot be reached"),
    "headers without end": (without_end(HEAD, b"X-A: b\r\n", 0), 6, "cannot be reached"),
    "a header line without end": (without_end(HEAD + b"X-A: ", b"a" * 4096, 0), 6, "cannot be reached"),
    "a terminal's commands": (says(503, b"\x1b[2J\x1b]0;owned\x07\xe2\x80\xae", "text/plain"), 6, r"\\x1b"),
    "a very long refusal": (says(500, b'{"message": "' + b"a" * 5_000_000 + b'"}'), 6, "not ready: 500"),
}
"""After these, what was to be made may be there."""
SLOW: dict[str, tuple[Spoil, int, str]] = {
    "silence": (hangs, 6, "no whole answer within"),
    "headers byte by byte": (without_end(HEAD, b"a", 0.01), 6, "no whole answer within"),
    "a body byte by byte": (without_end(LENGTHY, b" ", 0.01), 6, "no whole answer within"),
    "100 Continue without end": (without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01), 6, "no whole answer within"),
}
"""As UNCLEAR; without a bound of time these would not end."""
ODD: dict[str, Any] = {
    "GET healthz": [{"multi_user": "no"}, {"multi_user": {}}],
    "GET pipelines": [{"pipelines": 5}, {"pipelines": {"a": 1}}, {"pipelines": [None]}, {"pipelines": ["a"]},
                      {"pipelines": [{"display_name": "train"}]}, {"next_page_token": 5.5},
                      {"pipelines": [{"display_name": "train", "pipeline_id": 5}]},
                      {"pipelines": [{"display_name": "train", "pipeline_id": "../../x"}]},
                      {"pipelines": [{"display_name": "train", "pipeline_id": "a" * 300}]},
                      {"pipelines": [{"display_name": ["train"]}]}],
    "POST pipelines/upload": [{}, {"pipeline_id": None}, {"pipeline_id": True}, {"pipeline_id": ""}],
    "GET pipelines/*/versions": [{"pipeline_versions": "many"}, {"pipeline_versions": [[]]}],
    "POST pipelines/upload_version": [{}, {"pipeline_version_id": {}}, {"pipeline_version_id": "a b"}],
    "GET experiments": [{"experiments": True}, {"experiments": [{"display_name": "flexfleet"}]}],
    "POST experiments": [{}, {"experiment_id": []}, {"experiment_id": "\u202e\u0000"}],
    "POST runs": [{}, {"run_id": None}, {"run_id": 5}, {"run_id": {"a": 1}}, {"run_id": "r1\n"}, {"run_id": "a/b"},
                  {"run_id": "\ud800"}, {"run_id": "r1", "created_at": "soon"}, {"run_id": "r1", "state": {}},
                  {"run_id": "r1", "created_at": "2026-01-01T00:00:00"}, {"error": "no", "code": 3}],
    "GET runs": [{"runs": 5}, {"runs": [{"description": 5.5}]}],
    "GET recurringruns": [{"recurringRuns": 5}, {"recurringRuns": [{"display_name": "flexfleet-nightly"}]}],
    "POST recurringruns": [{}, {"recurring_run_id": 7}, {"recurring_run_id": [1]},
                           {"recurring_run_id": "j1", "mode": 1.5}],
}  # fmt: skip
"""JSON of other shapes, by the call."""

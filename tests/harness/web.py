"""Local HTTP servers whose answers are a function."""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

NONE: Mapping[str, str] = MappingProxyType({})


class Request(BaseHTTPRequestHandler):
    """A request, which `serving` passes on. Nothing is logged."""

    def body(self) -> bytes:
        """Read the body, which must be read at most once."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def respond(self, status: int, body: bytes = b"", headers: Mapping[str, str | None] = NONE) -> None:
        """Send a response. `headers` may replace Content-Length, or leave it out with None."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(answer: Callable[[Request], object], own: Path | None = None, protocol: str = "HTTP/1.0") -> Iterator[str]:
    """Yield the address of a server on 127.0.0.1. `own`: the file of a certificate and its key, for HTTPS."""

    class Handler(Request):
        protocol_version = protocol

        def do_GET(self) -> None:
            answer(self)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_CONNECT = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if own is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http{'' if own is None else 's'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def forward(request: Request, body: bytes, address: str, **more: str) -> tuple[int, bytes, dict[str, str | None]]:
    """Send the request, with `more` headers, to the server at `address`. Return the status, body and headers."""
    sent = {name: text for name, text in request.headers.items() if not name.lower().startswith("proxy-")}
    parts = urlsplit(request.path)  # a request to a proxy has an absolute address
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request(request.command, parts._replace(scheme="", netloc="").geturl(), body, sent | more)
    response = connection.getresponse()
    value = response.read()
    connection.close()
    own = ("content-length", "connection", "transfer-encoding", "date", "server")
    headers: dict[str, str | None] = {name: text for name, text in response.getheaders() if name.lower() not in own}
    return response.status, value, headers | {"Content-Length": response.getheader("Content-Length", str(len(value)))}


@contextmanager
def proxying(servers: Mapping[str, str], user: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a proxy for `user` (name:password) and the list of requests that it accepted. `servers` maps
    host names, which only the proxy can resolve, to addresses."""
    accepted: list[str] = []
    expected = f"Basic {base64.b64encode(user.encode()).decode()}"

    def answer(request: Request) -> None:
        body = request.body()
        if request.headers.get("Proxy-Authorization") != expected:
            request.respond(407, b"", {"Proxy-Authenticate": 'Basic realm="proxy"'})
            return
        accepted.append(f"{request.command} {request.path.partition('?')[0]}")
        if (address := servers.get(urlsplit(request.path).hostname or "")) is None:
            request.respond(502)
        else:
            request.respond(*forward(request, body, address, Host=urlsplit(address).netloc))

    with serving(answer) as address:
        yield address, accepted


@dataclass
class Values:
    """The values that a server returns to GET, by path, and those that were stored by PUT. Other paths are redirected
    to `elsewhere`."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    elsewhere: str = "/elsewhere"
    asked: list[str] = field(default_factory=list)

    def answer(self, request: Request) -> None:
        path = request.path.partition("?")[0].strip("/")
        self.asked.append(path)
        if request.command == "PUT":
            self.files[path] = request.body()
        value = self.files.get(path)
        body = b"" if request.command == "PUT" or value is None else value
        request.respond(self.statuses.get(path, 302 if value is None else 200), body, {"Location": self.elsewhere})


@contextmanager
def serving_values(own: Path | None = None) -> Iterator[Values]:
    found = Values()
    with serving(found.answer, own) as found.url:
        yield found


@dataclass
class Server:
    url: str
    status: int
    seen: list[tuple[str, Any, bytes]] = field(default_factory=list)
    """Path, headers and body of each request."""
    plan: list[tuple[int, Mapping[str, str], bytes]] = field(default_factory=list)
    """Status, headers and body of the next answers."""


@contextmanager
def answering(status: int = 200, body: str = "", **headers: str) -> Iterator[Server]:
    """Yield a server that records the requests, and gives each the same answer after those of its `plan`."""
    found = Server("", status)

    def answer(request: Request) -> None:
        found.seen.append((request.path, request.headers, request.body()))
        status, more, value = found.plan.pop(0) if found.plan else (found.status, headers, body.encode())
        request.respond(status, value, more)

    with serving(answer) as found.url:
        yield found

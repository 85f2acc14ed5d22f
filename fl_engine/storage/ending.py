"""Answers of an S3 server end, or are given up: botocore's timeout is of each piece, and a server that sends a byte now
and then, or sends without end, would keep the coordinator busy for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import urllib3

from fl_engine.core.errors import Unreachable
from fl_engine.storage.urls import PIECE

ANSWER_S = 120.0
"""Seconds in which an answer may end, besides those for its bytes."""
SLOWEST = 2**14
"""Bytes a second: an answer has a second more for as many."""
SAID = 2**26
"""The most bytes of an answer that is no value: a listing of 1000 keys has 7 MB at most."""


class Ending:
    """The body of an answer, which raises Unreachable where it does not end in its time, or has more than `most`
    bytes."""

    def __init__(self, raw: Any, url: str, most: int | None, seconds: float = ANSWER_S) -> None:
        self._raw, self._url, self._most = raw, url.partition("?")[0], most
        self._began, self._read, self._seconds = time.monotonic(), 0, seconds

    def read(self, amt: int | None = None) -> bytes:
        value = bytearray()
        while amt is None or len(value) < amt:
            piece = self._raw.read1(PIECE if amt is None else min(PIECE, amt - len(value)))
            if not piece:
                break
            value += piece
            self._read += len(piece)
            took = time.monotonic() - self._began
            if took > self._seconds + self._read / SLOWEST or (self._most is not None and self._read > self._most):
                self._raw.close()
                raise Unreachable(
                    f"{self._url}: the server's answer does not end: {self._read} bytes came in {took:.0f} s; what "
                    "answers there may be no S3 server"
                )
        return bytes(value)

    def stream(self, *_: object) -> Iterator[bytes]:
        """All, for botocore."""
        yield self.read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def see_to_it(client: Any, seconds: float = ANSWER_S) -> None:
    """From now on answers to this client of botocore's end."""
    from botocore.awsrequest import AWSResponse
    from botocore.exceptions import ConnectionClosedError, HTTPClientError, ReadTimeoutError, SSLError

    session = client._endpoint.http_session  # botocore has no public way to it

    def send(request: Any, **_: object) -> Any:
        streams, request.stream_output = request.stream_output, True
        answer = session.send(request)
        raw = Ending(answer.raw, request.url, None if streams and answer.status_code < 300 else SAID, seconds)
        found = AWSResponse(answer.url, answer.status_code, answer.headers, raw)
        if not streams:
            try:
                _ = found.content
            except urllib3.exceptions.ReadTimeoutError as error:  # as botocore has them, which then tries again
                raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
            except urllib3.exceptions.ProtocolError as error:
                raise ConnectionClosedError(error=error, request=request, endpoint_url=request.url) from error
            except urllib3.exceptions.SSLError as error:
                raise SSLError(endpoint_url=request.url, error=error) from error
            except urllib3.exceptions.HTTPError as error:
                raise HTTPClientError(error=error) from error
        return found

    client.meta.events.register("before-send.s3", send)

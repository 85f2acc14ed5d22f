"""The way to the store passes all on, and cuts off the process that it is told to, where it is told to.

The device is this process. It asks with 20 bytes, and the server answers each request with 100.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.harness.way import Cut, How, Way, _inode

ME = os.getpid()
ORDER, LETTER = b"GET /orders/1 .....\n", b"GET /letter.json ..\n"
ANSWER = bytes(range(100))
SOON_S, PATIENCE_S = 0.3, 20.0


@pytest.fixture
def arrived() -> list[bytes]:
    """What has arrived at the server, by connection."""
    return []


@pytest.fixture
def server(arrived: list[bytes]) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers(connection: socket.socket, place: int) -> None:
            while data := connection.recv(2**16):
                arrived[place] += data
                if arrived[place].endswith(b"\n"):
                    connection.sendall(ANSWER)
            connection.close()

        def serves() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                arrived.append(b"")
                threading.Thread(target=answers, args=(connection, len(arrived) - 1), daemon=True).start()

        threading.Thread(target=serves, daemon=True).start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def way(server: tuple[str, int]) -> Iterator[Way]:
    with closing(Way(server, lambda: [ME])) as found:
        yield found


def connected(way: Way, timeout_s: float = PATIENCE_S) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(way.url.rpartition(":")[2])), timeout=timeout_s)


def asked(connection: socket.socket, request: bytes) -> bytes:
    """As much of the answer as arrives."""
    found = b""
    try:
        connection.sendall(request)
        while len(found) < len(ANSWER) and (data := connection.recv(2**16)):
            found += data
    except ConnectionError:
        pass
    return found


def asked_anew(way: Way, request: bytes) -> bytes:
    """Likewise, on a connection of its own."""
    try:
        with connected(way) as connection:
            return asked(connection, request)
    except ConnectionError:
        return b""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_both_ways_to_ask_the_kernel_name_the_socket(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(way) as one:
        sides, own = (one.getsockname(), one.getpeername()), os.fstat(one.fileno()).st_ino
        assert _inode(*sides) == own and _inode(sides[0], sides[0]) == 0, "none is connected with itself"
        monkeypatch.setattr("tests.harness.way.SOCK_DIAG", 31)  # a protocol that no kernel has
        assert _inode(*sides) == own and _inode(sides[0], sides[0]) == 0, "none is connected with itself"


def test_all_passes_for_a_process_that_is_not_cut_off(way: Way) -> None:
    way.cut_off(ME + 1)
    with connected(way) as one, connected(way) as other:
        for connection in (one, other, one):
            assert asked(connection, ORDER) == ANSWER


def test_a_process_that_is_refused_has_no_connection_until_it_is_let_back(way: Way, arrived: list[bytes]) -> None:
    with connected(way) as before:
        assert asked(before, ORDER) == ANSWER
        way.cut_off(ME)
        assert way.has_begun(ME)
        assert asked(before, ORDER) == b""
    assert asked_anew(way, ORDER) == b""
    way.let_back(ME)
    assert asked_anew(way, ORDER) == ANSWER
    assert arrived == [ORDER, ORDER], "of what was asked during the cut, nothing"


@pytest.mark.parametrize(("how", "again"), [("refused", 0), ("breaks", 50 - 20)])
def test_a_download_breaks_after_so_many_bytes(way: Way, how: How, again: int) -> None:
    """50 bytes: the 20 of the request, and 30 of the answer."""
    way.cut_off(ME, Cut(how, (b"/orders/",), 50))
    with connected(way) as one, connected(way) as other:
        assert asked(one, LETTER) == asked(other, LETTER) == ANSWER
        assert not way.has_begun(ME), "a letter is no order"
        assert asked(one, ORDER) == ANSWER[:30]
        assert way.has_begun(ME)
        assert asked(other, LETTER) == b"", "the cut meets all connections of the process"
    assert len(asked_anew(way, LETTER)) == again


def test_an_upload_that_hangs_half_way_arrives_late(way: Way, arrived: list[bytes]) -> None:
    way.cut_off(ME, Cut("hangs", (b"/orders/",), 15, seconds=4 * SOON_S))
    with connected(way, SOON_S) as one:
        with pytest.raises(TimeoutError):
            asked(one, ORDER)
        assert arrived == [ORDER[:15]]
        with connected(way, SOON_S) as other, pytest.raises(TimeoutError):
            asked(other, LETTER)
    until(lambda: arrived == [ORDER, LETTER])  # though both connections are closed
    assert asked_anew(way, ORDER) == ANSWER, "the cut is over"


def test_a_request_that_is_shorter_is_cut_off_from_the_next_one(way: Way, arrived: list[bytes]) -> None:
    way.cut_off(ME, Cut("breaks", (b"/orders/",), 1000))
    with connected(way) as one:
        assert asked(one, ORDER) == ANSWER
        assert not way.has_begun(ME)
        assert asked(one, LETTER) == b"" and way.has_begun(ME)
    assert arrived == [ORDER]


def test_a_cut_begins_after_a_request_whose_connection_ends(way: Way) -> None:
    way.cut_off(ME, Cut("refused", (b"/orders/",), 1000))
    with connected(way) as one:
        assert asked(one, ORDER) == ANSWER
    until(lambda: way.has_begun(ME))

"""Every call of submit and nightly, and every way in which its answer may not come: one line, in time, with the exit
code that says whose fault it is; and never a success without an id, nor a second run."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import urllib3

from flexfleet.kubeflow import making, server, submit, transport
from tests.harness.tls import certificates
from tests.pipelines import hostile

SUBMIT = ("GET healthz", "GET pipelines", "POST pipelines/upload", "GET pipelines/*/versions",
          "POST pipelines/upload_version", "GET experiments", "POST experiments", "GET runs", "POST runs")  # fmt: skip
NIGHTLY = ("GET recurringruns", "POST recurringruns", "DELETE recurringruns/*")
CALLS = (*SUBMIT, *NIGHTLY)
BOUND_S = 0.3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Any]) -> None:
    monkeypatch.setattr(submit, "_checked", checked)
    monkeypatch.setattr(making, "LOOKS_S", (0.0, 0.0))
    monkeypatch.setattr(making, "LOOK_S", BOUND_S / 2)
    monkeypatch.setattr(transport, "ANSWER_S", BOUND_S)
    monkeypatch.setattr(server, "LIST_S", BOUND_S)


def tell(flexfleet: Any, host: str, call: str) -> Any:
    """The command that makes the call; recurring runs of the name are there before."""
    if call in NIGHTLY:
        return flexfleet("nightly", "--host", host, "--json")
    return flexfleet("submit", "train", "--host", host, "--json", *(["--key", "k"] if call == "GET runs" else []))


def met(kubeflow: tuple[Any, str], flexfleet: Any, call: str, spoil: hostile.Spoil) -> tuple[Any, float]:
    """How the command ends, and the seconds that it took."""
    stand_in, host = kubeflow
    if call == "DELETE recurringruns/*":
        stand_in.experiments.append({"experiment_id": "e0", "display_name": "flexfleet"})
        stand_in.recurring.append({"recurring_run_id": "old", "display_name": "flexfleet-nightly", "mode": "ENABLE"})
    stand_in.spoils[call] = [spoil]
    began = time.monotonic()
    done = tell(flexfleet, host, call)
    took = time.monotonic() - began
    assert call in stand_in.heard
    return done, took


def one_line(done: Any, host: str) -> None:
    assert done.err.count("\n") == 1 and "Traceback" not in done.err and not done.out, done.err
    assert done.err.startswith("error: ") and len(done.err) < 2000
    assert done.err.strip().isprintable() and host in done.err


FAULTS = {**hostile.REFUSED, **hostile.UNCLEAR}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_a_call_is_one_line(kubeflow: tuple[Any, str], flexfleet: Any, call: str, fault: str) -> None:
    spoil, code, said = FAULTS[fault]
    stand_in, host = kubeflow
    done, _ = met(kubeflow, flexfleet, call, spoil)
    if (call, fault) == ("DELETE recurringruns/*", "404 of the API"):
        assert done.code == 0, "what is gone need not be deleted"
        return
    code = 6 if call == "DELETE recurringruns/*" else code
    assert done.code == code, done.err
    one_line(done, host)
    assert re.search(said, done.err), done.err
    assert "s3cret" not in done.err
    assert f"asked: {call.partition(' ')[0]} /apis/v2beta1/" in done.err
    assert not stand_in.runs and len(stand_in.recurring) == (2 if call.startswith("DELETE") else 0)
    if call == "POST runs":
        assert ("may have been started" in done.err) is (fault in hostile.UNCLEAR), done.err
    posts = [each for each in stand_in.heard if each.startswith("POST")]
    assert len(posts) == len(set(posts)), "nothing is made twice"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", hostile.SLOW)
def test_what_would_never_end_ends_in_time(kubeflow: tuple[Any, str], flexfleet: Any, call: str, fault: str) -> None:
    spoil, code, said = hostile.SLOW[fault]
    done, took = met(kubeflow, flexfleet, call, spoil)
    assert done.code == code, done.err
    one_line(done, kubeflow[1])
    assert said in done.err and took < BOUND_S + 2, took


def test_an_answer_may_take_longer_than_a_connection(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ANSWER_S", 10.0)
    monkeypatch.setattr(transport, "CONNECT_S", 0.05)

    def late(handler: Any, answer: hostile.Answer) -> None:
        time.sleep(0.3)
        hostile.answers(handler, answer)

    done, _ = met(kubeflow, flexfleet, "POST runs", late)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("call", "shape"), [pytest.param(c, s, id=f"{c} {n}") for c, all in hostile.ODD.items() for n, s in enumerate(all)]
)
def test_json_of_another_shape_is_no_success(kubeflow: tuple[Any, str], flexfleet: Any, call: str, shape: Any) -> None:
    done, _ = met(kubeflow, flexfleet, call, hostile.sends(shape))
    assert done.code == 6, (done.out, done.err)
    one_line(done, kubeflow[1])
    assert "not the API of Kubeflow Pipelines" in done.err


def test_an_answer_of_any_size_is_read_to_a_bound(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ANSWER_S", 30.0)
    monkeypatch.setattr(transport, "MOST", 2**20)
    endless = hostile.without_end(hostile.LENGTHY, b" " * 65536, 0)
    done, _ = met(kubeflow, flexfleet, "GET experiments", endless)
    assert done.code == 6 and "more than 1 MiB" in done.err


@pytest.mark.parametrize("token", ["same", "ever new"])
@pytest.mark.parametrize(
    ("call", "field"),
    [("GET pipelines", "pipelines"), ("GET experiments", "experiments"), ("GET pipelines/*/versions", "x"),
     ("GET recurringruns", "recurringRuns"), ("GET runs", "runs")],
)  # fmt: skip
def test_a_list_without_end_ends(kubeflow: tuple[Any, str], flexfleet: Any, call: str, field: str, token: str) -> None:
    def spoil(handler: Any, answer: hostile.Answer) -> None:
        new = "t" if token == "same" else str(time.monotonic_ns())
        hostile.sends({field: [], "next_page_token": new})(handler, answer)

    done, took = met(kubeflow, flexfleet, call, spoil)
    assert done.code == 6, done.err
    one_line(done, kubeflow[1])
    assert ("names a page again" if token == "same" else "has not ended after") in done.err and took < 2 * BOUND_S + 2
    assert token != "same" or kubeflow[0].heard.count(call) == 2


def test_credentials_stay_with_the_host_that_was_asked(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, host = kubeflow
    seen: list[str | None] = []

    def elsewhere(handler: Any, answer: hostile.Answer) -> None:
        seen.append(handler.headers.get("Cookie"))
        to = host.replace("127.0.0.1", "localhost") + "/apis/v2beta1/pipelines"
        hostile.says(302, b"", Location=to)(handler, answer)

    import kfp

    monkeypatch.setattr(
        kfp.Client, "_load_context_setting_or_default",
        lambda self: setattr(self, "_context_setting", {"namespace": "", "client_authentication_cookie": "session=s"}),
    )  # fmt: skip
    stand_in.spoils["GET pipelines"] = [elsewhere]
    done = flexfleet("submit", "train", "--host", host)
    assert done.code == 6 and "which is not followed" in done.err and "session=s" not in done.err
    assert (seen, stand_in.heard) == (["session=s"], ["GET healthz", "GET pipelines"])


@pytest.mark.parametrize("call", SUBMIT)
def test_a_session_that_ends_half_way_is_said(kubeflow: tuple[Any, str], flexfleet: Any, call: str) -> None:
    """And the same command goes on where it ended."""
    stand_in, host = kubeflow
    done, _ = met(kubeflow, flexfleet, call, hostile.says(401, b"Jwt is expired", "text/plain"))
    assert done.code == 6 and "Jwt is expired" in done.err and "log in anew" in done.err
    stand_in.spoils.clear()
    done = tell(flexfleet, host, call)
    assert done.code == 0 and done.json["run_id"] == "r1"
    assert len(stand_in.runs) == len(stand_in.versions) == len(stand_in.pipelines) == len(stand_in.experiments) == 1


@pytest.mark.parametrize("host", ["https://127.0.0.1", "127.0.0.1"])
def test_a_server_without_tls_is_said(
    kubeflow: tuple[Any, str], flexfleet: Any, recwarn: pytest.WarningsRecorder, host: str
) -> None:
    """The SDK puts https:// before an address without either."""
    done = flexfleet("submit", "train", "--host", f"{host}:{kubeflow[1].rpartition(':')[2]}")
    assert done.code == 6 and "https://127.0.0.1" in done.err and "--host http://" in done.err
    one_line(done, "127.0.0.1")
    assert not [each for each in recwarn if "protocol" in str(each.message)]


@pytest.mark.parametrize(
    "address",
    ["http://", "ftp://kubeflow", "http://host:99999", "http://ho st", "http://host:a", "http://localhost/#/runs",
     "http://localhost/?ns=x", "http://[::1", "http://host\x1b[2J"],
)  # fmt: skip
@pytest.mark.parametrize("variable", [False, True])
def test_an_address_that_is_none_is_wrong_input(
    flexfleet: Any, monkeypatch: pytest.MonkeyPatch, address: str, variable: bool
) -> None:
    if variable:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", address)
    done = flexfleet("submit", "train", *([] if variable else ["--host", address]))
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert ("KF_PIPELINES_ENDPOINT is" if variable else "--host is") in done.err


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"], ids=["before", "within"])
def test_tls_that_breaks_after_the_question_leaves_it_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(transport, "ANSWER_S", 30.0)
    authority, own = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)

    def serve() -> None:
        connection, _ = listening.accept()
        with connection.dup() as bare, context.wrap_socket(connection, server_side=True) as secure:
            question = b""
            while not question.endswith(b"{}"):  # a connection that is closed with something unread takes all back
                question += secure.recv(65536) or b"{}"
            secure.sendall(answer)
            bare.sendall(b"\x17\x03\x03\x00\x20" + b"x" * 32)  # a record that nobody encrypted
            with contextlib.suppress(OSError):
                bare.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/apis/v2beta1/runs"
        with pytest.raises(transport.Undecided, match="bad record mac"):
            transport.Pool(urllib3.PoolManager(ca_certs=str(authority))).request("POST", url, body=b"{}")


def test_a_password_of_an_address_is_not_shown(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    done = flexfleet("submit", "train", "--host", kubeflow[1].replace("http://", "http://me:pl4nted@"))
    assert done.code == 0 and "pl4nted" not in done.out + done.err, done.err


def test_a_password_in_what_a_server_says_is_not_cut_in_two(kubeflow: tuple[Any, str], flexfleet: Any) -> None:
    """Its end is what it is known by."""
    stand_in, host = kubeflow
    said = f"{'x' * (transport.SHOWN - 24)} postgresql://me:pl4nted-word@host/db"
    stand_in.spoils["POST runs"] = [hostile.says(400, json.dumps({"code": 3, "message": said}).encode())]
    done = tell(flexfleet, host, "POST runs")
    assert done.code == 2 and "postgresql://" in done.err and "pl4n" not in done.err, done.err


def test_files_of_the_sdk_that_cannot_be_read_are_said(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import kfp

    (tmp_path / "context.json").write_text("{")
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    done = flexfleet("submit", "train", "--host", kubeflow[1])
    assert done.code == 6 and done.err.count("\n") == 1 and "context.json" in done.err

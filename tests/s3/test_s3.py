"""The store on S3, against moto and, where it is installed, a real server (Ceph's radosgw)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import torch
from botocore.exceptions import ClientError

from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.core.types import ClientUpdate, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of, manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.messages import Assignment
from fl_engine.storage import s3
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.serialization import laid_out
from fl_engine.storage.urls import Upload, UrlStore, Verb
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import run

BUCKET = "runs"
PLAN = RoundPlan(0, tuple(WorkOrder(0, client, SubmodelSpec(), {"w": torch.zeros(4)}, client, 0) for client in (0, 1)))
LEASE = "11" * 8


@pytest.fixture
def store(server: str, request: pytest.FixtureRequest) -> S3Store:
    return S3Store(f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}")


def test_values_come_back_and_keys_are_listed_under_their_prefix(store: S3Store) -> None:
    for key in ("b/2", "a/1", "a/10", "empty"):
        store.put(key, key.encode() if key != "empty" else b"")
    assert store.get("a/1") == b"a/1" and store.get("empty") == b""
    assert store.list("") == ["a/1", "a/10", "b/2", "empty"]
    assert store.list("a/1") == ["a/1", "a/10"] and store.list("c") == []
    store.put("a/1", b"new")
    assert store.get("a/1") == b"new"
    store.delete("a/1", "nothing")
    store.delete()
    assert store.list("a/") == ["a/10"]
    assert store.uri("a/10").endswith("/a/10") and store.uri().startswith("s3://runs/")


def test_more_keys_than_a_page_holds(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PAGE", 10)
    keys = [f"k/{i:04d}" for i in range(25)]
    for key in keys:
        store.put(key, b"")
    assert store.list("k/") == keys
    store.delete(*keys)
    assert store.list("") == []


def test_what_is_missing_or_too_large_is_said(store: S3Store) -> None:
    with pytest.raises(IntegrityError, match="none"):
        store.get("none")
    store.put("key", b"12345")
    assert store.get("key", 5) == b"12345"
    with pytest.raises(IntegrityError, match="5 bytes"):
        store.get("key", 4)
    with pytest.raises(EnvironmentFailure, match="NoSuchBucket"):
        S3Store("s3://nobodys-bucket/x").put("key", b"")
    with pytest.raises(ConfigError, match="s3://"):
        S3Store("s3://")


def test_large_value_is_uploaded_in_parts_whole_or_never(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", 5 * 2**20)
    value = os.urandom(11 * 2**20)
    store.put("large", value)
    assert store.get("large") == value
    whole = laid_out({"w": torch.arange(3 * 2**20), "b": torch.ones(3)})
    store.put("model", whole)
    assert store.get("model") == bytes(whole)
    sent: list[int] = []
    upload = store._client.upload_part

    def breaks(**given: object) -> object:
        if sent:
            raise KeyboardInterrupt
        sent.append(1)
        return upload(**given)

    monkeypatch.setattr(store._client, "upload_part", breaks)
    with pytest.raises(KeyboardInterrupt):
        store.put("larger", value)
    assert store.list("larger") == []
    client = boto3.session.Session(region_name="us-east-1").client("s3")
    left = client.create_multipart_upload(Bucket=BUCKET, Key=store.uri("rounds/x").split("/", 3)[3])
    store.sweep("rounds/")
    with pytest.raises(client.exceptions.ClientError, match=r"NoSuch(Upload|Key)"):
        client.list_parts(Bucket=BUCKET, Key=left["Key"], UploadId=left["UploadId"])


def test_damage_is_seen_when_it_is_read_and_is_not_waited_for(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could have the coordinator wait for each of its objects."""
    slept: list[float] = []
    monkeypatch.setattr(s3.time, "sleep", slept.append)
    store.put("key", b"good")
    client, key = boto3.session.Session(region_name="us-east-1").client("s3"), store.uri("key").split("/", 3)[3]
    known = client.head_object(Bucket=BUCKET, Key=key)["Metadata"]
    client.put_object(Bucket=BUCKET, Key=key, Body=b"evil", Metadata=known)
    with pytest.raises(IntegrityError):
        store.get("key")
    with pytest.raises(IntegrityError):
        store.get("key", 3)
    assert slept == []


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_a_model_goes_up_by_url_without_a_copy(store: S3Store, verb: Verb) -> None:
    whole = laid_out({"w": torch.randn(500, 700), "b": torch.ones(3)})
    UrlStore({}, {"update": store.upload("update", len(whole), 60, verb)}).put("update", whole)
    assert store.get("update") == bytes(whole)
    with pytest.raises(ConfigError):
        store.upload("update", 6 * 10**9, 60, verb)


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_an_upload_that_is_sent_again_begins_anew(verb: Verb) -> None:
    whole, seen = laid_out({"w": torch.arange(10**5)}), list[bytes]()

    class Busy(BaseHTTPRequestHandler):
        def answer(self) -> None:
            seen.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(503 if len(seen) == 1 else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = answer

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        UrlStore({}, {"update": Upload(verb=verb, url=url, fields={"key": "update"}, size=10**6)}).put("update", whole)
        server.shutdown()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0] == bytes(whole) if verb == "PUT" else bytes(whole) in seen[0]


def test_what_a_server_refuses_is_explained(server: str, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if server == "moto":
        pytest.skip("moto takes any secret and any signature")
    store.put("key", b"x")
    old = UrlStore({"key": store.presign("key", 1)}, {})
    monkeypatch.setattr(s3, "READS", 1)
    time.sleep(2.1)
    with pytest.raises(IntegrityError, match="HTTP 403"):
        old.get("key")
    url = store.presign("key", 60)
    forged = UrlStore({"key": url[:-4] + "0000"}, {})
    with pytest.raises(IntegrityError, match="HTTP 403"):
        forged.get("key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(EnvironmentFailure, match="SignatureDoesNotMatch"):
        S3Store(store.uri()).get("key")


class _Broken(BaseHTTPRequestHandler):
    """Answers by the plan: a status, `head` or `cut` for a head or a body that breaks off, or `endless` for a body that
    does not end."""

    plan: list[object] = []  # noqa: RUF012 - set by the test
    sent = 0

    def do_GET(self) -> None:
        step = self.plan.pop(0) if self.plan else 200
        if step == "endless":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while _Broken.sent < 2**30:
                    _Broken.sent += self.wfile.write(bytes(2**16))
            self.close_connection = True
            return
        if step == "head":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-am")
            self.close_connection = True
            return
        self.send_response(200 if step == "cut" else int(str(step)))
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"wh" if step == "cut" else b"whole")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(s3.time, "sleep", lambda _: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broken)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_variables_of_its_own_come_before_those_of_everybody(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a task of Kubeflow's, the launcher reads the others."""
    S3Store(f"s3://{BUCKET}/{server}").put("own", b"value")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"FLEXFLEET_{name}", os.environ[name])
        monkeypatch.setenv(name, "http://127.0.0.1:9" if name == "AWS_ENDPOINT_URL" else "another's")
    assert S3Store(f"s3://{BUCKET}/{server}").get("own") == b"value"


def test_answers_that_break_off_and_busy_servers_are_asked_again(broken: str) -> None:
    _Broken.plan = ["cut", 503, "cut"]
    assert S3Store("s3://runs/x", broken).get("key") == b"whole"
    _Broken.plan = ["cut", 500, 429]
    assert UrlStore({"key": f"{broken}/key?secret=1"}, {}).get("key") == b"whole"
    assert not _Broken.plan


def test_a_head_that_breaks_off_puts_no_url_into_the_log(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """urllib3 warns of it with a traceback, and with the URL, whose query is a signature."""
    _Broken.plan = ["head"]
    assert UrlStore({"key": f"{broken}/key?X-Amz-Signature=secret"}, {}).get("key") == b"whole"
    assert not _Broken.plan and "secret" not in caplog.text


def test_body_without_a_length_is_read_up_to_the_limit(broken: str) -> None:
    for get in (S3Store("s3://runs/x", broken).get, UrlStore({"key": f"{broken}/key"}, {}).get):
        _Broken.plan, _Broken.sent = ["endless"], 0
        with pytest.raises(IntegrityError):
            get("key", 100_000)
        assert _Broken.sent < 2**25, "what the sockets hold, and no more"


def test_a_server_that_is_not_there_is_said_without_its_secrets(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """urllib3 warns of each try, with the URL, whose query is a signature."""
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    with pytest.raises(EnvironmentFailure, match="AWS_ENDPOINT_URL"):
        S3Store("s3://runs/x", "http://127.0.0.1:9").get("key")
    with pytest.raises(EnvironmentFailure) as error:
        UrlStore({"key": "http://127.0.0.1:9/key?X-Amz-Signature=secret"}, {}).get("key")
    assert "secret" not in str(error.value) and "secret" not in caplog.text


def test_ledger_on_s3_has_the_bits_of_one_in_a_folder(
    server: str, tmp_path: Path, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store also has the results, so another machine can continue."""
    monkeypatch.chdir(tmp_path)
    folder = run(Resolved.load(None, quick), "folder")
    remote = (f"run.remote=s3://{BUCKET}/{server}", "rounds.keep_updates=true")
    remote += ("tune.storage=postgresql://me:planted-secret@host/db",)
    bucket = run(Resolved.load(None, (*quick, *remote)), "bucket")
    assert folder.model_sha256 == bucket.model_sha256
    store = S3Store(f"s3://{BUCKET}/{server}/bucket")
    assert bucket.store_uri == store.uri()
    assert store.get("model.safetensors") == Path("runs/folder/model.safetensors").read_bytes()
    for name in ("result.json", "report.html", "manifest.json"):
        assert store.get(name) == Path("runs/bucket", name).read_bytes()
    assert not [key for key in store.list("") if b"planted-secret" in store.get(key)], "clients read what is there"
    kept = store.list("rounds/")
    assert "rounds/00002/1-COMMITTED" in kept and not any("updates" in key or "orders" in key for key in kept)
    # On another machine, with nothing but the store.
    Path("runs/bucket").rename("gone")
    assert run(Resolved.load(None, (*quick, *remote)), "bucket", resume=True).model_sha256 == bucket.model_sha256


@pytest.fixture
def scripted(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The next answers to what `store` puts and deletes, in place of the server's; it waits for nothing."""
    answers: list[Any] = []

    def instead(asked: Callable[..., Any]) -> Callable[..., Any]:
        def ask(**given: Any) -> Any:
            answer = answers.pop(0) if answers else asked(**given)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    for name in ("put_object", "delete_objects"):
        monkeypatch.setattr(store._client, name, instead(getattr(store._client, name)))
    monkeypatch.setattr(s3.time, "sleep", lambda _: None)
    return answers


def refusal(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def test_a_creation_that_meets_another_request_is_tried_again(store: S3Store, scripted: list[Any]) -> None:
    """That request may be an earlier try of the same, or fail."""
    scripted += [refusal(409, "ConditionalRequestConflict")] * 2
    assert store.create("key", b"mine")
    assert store.get("key") == b"mine"
    scripted += [refusal(409, "ConditionalRequestConflict"), refusal(412, "PreconditionFailed")]
    assert not store.create("key", b"another's")
    scripted += [refusal(409, "ConditionalRequestConflict")] * s3.ATTEMPTS
    assert not store.create("key", b"another's"), "a server that says so of a key that is there"
    scripted += [refusal(409, "ConditionalRequestConflict")] * s3.ATTEMPTS
    with pytest.raises(EnvironmentFailure, match="ConditionalRequestConflict"):
        store.create("another", b"mine")


def test_deletion_repeats_only_keys_of_a_busy_server(store: S3Store, scripted: list[Any]) -> None:
    for key in ("a", "b"):
        store.put(key, b"value")
    failed = {"Key": store._prefix + "a", "Code": "InternalError"}
    scripted.append({"Errors": [failed]})
    store.delete("a")
    assert store.list("") == ["b"]
    scripted.append({"Errors": [failed | {"Code": "AccessDenied"}]})
    with pytest.raises(EnvironmentFailure, match="AccessDenied"):
        store.delete("a", "b")
    scripted += [{"Errors": [failed]}] * s3.ATTEMPTS
    with pytest.raises(EnvironmentFailure, match="InternalError"):
        store.delete("a", "b")
    assert not scripted and store.list("") == ["b"]


def test_of_many_that_create_a_key_at_once_one_succeeds(store: S3Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: store.create("key", b"%d" % n), range(8)))
    assert sum(made) == 1 and store.get("key") == b"%d" % made.index(True)


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_results_of_a_pod_arrive_by_post_and_by_put(server: str, verb: Verb, tmp_path: Path) -> None:
    """A PUT has the signed length, so a shorter result is padded."""
    store, order = S3Store(f"s3://runs/{tmp_path.name}"), PLAN.orders[1]
    ledger, key = Mailbox(store, key=key_of(b"secret"), lease=LEASE), key_of(b"secret")(order)
    keys = dict(zip(ledger.outcome_keys(0, 1), (payload_bytes(order), manifest_bytes(order)), strict=True))
    writes = {name: store.upload(name, size, 60, verb) for name, size in keys.items()}
    told = Assignment(round=0, clients=(1,), writes=writes)
    pod = Mailbox(told.open(), key=lambda _: key, lengths=told.lengths, lease=LEASE)
    pod.put_outcome(PLAN, ClientUpdate(0, 1, order.spec, {"w": torch.arange(4.0)}, 1, {}))
    found = ledger.receive(PLAN, 1)
    assert isinstance(found, ClientUpdate) and found.payload["w"].tolist() == [0, 1, 2, 3]
    sizes = {name: len(store.get(name)) for name in keys}
    assert sizes == keys if verb == "PUT" else all(sizes[name] < keys[name] for name in keys)


def test_server_that_refuses_all_is_an_environment_failure(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server == "moto":
        pytest.skip("moto takes any secret")
    store = S3Store(f"s3://runs/{tmp_path.name}")
    Mailbox(store, key=key_of(b"secret")).put_outcome(
        PLAN, ClientUpdate(0, 1, SubmodelSpec(), {"w": torch.ones(4)}, 1, {})
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "revoked")
    with pytest.raises(EnvironmentFailure, match="SignatureDoesNotMatch"):
        Mailbox(S3Store(store.uri()), key=key_of(b"secret")).receive(PLAN, 1)

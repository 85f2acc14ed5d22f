"""The store on S3, against moto and, where it is installed, a real server (Ceph's radosgw)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import boto3.session
import pytest
import torch

from fl_engine.core.errors import Busy, ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.core.types import Assignment, ClientUpdate, RoundPlan, SubmodelSpec
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of, manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.messages import AssignmentMessage
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import laid_out
from fl_engine.storage.urls import Upload, UrlStore, Verb
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from flexfleet.pipeline.run import run
from tests.harness.web import Server
from tests.s3.conftest import Proxy

BUCKET = "runs"
PLAN = RoundPlan(0, tuple(Assignment(0, client, SubmodelSpec(), {"w": torch.zeros(4)}, client, 0) for client in (0, 1)))
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


def test_what_is_missing_or_too_large_is_said(store: S3Store) -> None:
    with pytest.raises(IntegrityError):
        store.get("none")
    store.put("key", b"12345")
    assert store.get("key", 5) == b"12345"
    with pytest.raises(IntegrityError):
        store.get("key", 4)
    with pytest.raises(EnvironmentFailure):
        S3Store("s3://nobodys-bucket/x").put("key", b"")
    with pytest.raises(ConfigError):
        S3Store("s3://")


def test_damage_is_seen_when_it_is_read_and_is_not_waited_for(store: S3Store, proxy: Proxy) -> None:
    """A client could have the coordinator wait for each of its objects."""
    requests: list[str] = []
    proxy.fault = lambda verb, _: requests.append(verb)  # type: ignore[func-returns-value]
    store.put("key", b"good")
    client, key = boto3.session.Session(region_name="us-east-1").client("s3"), store.uri("key").split("/", 3)[3]
    known = client.head_object(Bucket=BUCKET, Key=key)["Metadata"]
    client.put_object(Bucket=BUCKET, Key=key, Body=b"evil", Metadata=known)
    behind = S3Store(store.uri(), proxy.address)
    with pytest.raises(IntegrityError):
        behind.get("key")
    with pytest.raises(IntegrityError):
        behind.get("key", 3)
    assert requests == ["GET", "GET"]


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_a_model_goes_up_by_url_without_a_copy(store: S3Store, verb: Verb) -> None:
    whole = laid_out({"w": torch.randn(500, 700), "b": torch.ones(3)})
    UrlStore({}, {"update": store.upload("update", len(whole), 60, verb)}).put("update", whole)
    assert store.get("update") == bytes(whole)
    with pytest.raises(ConfigError):
        store.upload("update", 6 * 10**9, 60, verb)


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_an_upload_that_is_sent_again_begins_anew(scripted: Server, verb: Verb) -> None:
    whole, scripted.plan = laid_out({"w": torch.arange(10**5)}), [(503, {}, b"")]
    upload = Upload(verb=verb, url=scripted.url, fields={"key": "update"}, size=10**6)
    UrlStore({}, {"update": upload}).put("update", whole)
    first, second = (body for _, _, body in scripted.seen)
    assert first == second
    assert first == bytes(whole) if verb == "PUT" else bytes(whole) in first


def test_what_a_server_refuses_is_explained(server: str, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if server == "moto":
        pytest.skip("moto takes any secret and any signature")
    store.put("key", b"x")
    old = UrlStore({"key": store.presign("key", 1)}, {})
    time.sleep(2.1)
    with pytest.raises(IntegrityError):
        old.get("key")
    url = store.presign("key", 60)
    forged = UrlStore({"key": url[:-4] + "0000"}, {})
    with pytest.raises(IntegrityError):
        forged.get("key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(EnvironmentFailure):
        S3Store(store.uri()).get("key")


def test_variables_of_its_own_come_before_those_of_everybody(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a task of Kubeflow's, the launcher reads the others."""
    S3Store(f"s3://{BUCKET}/{server}").put("own", b"value")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"FLEXFLEET_{name}", os.environ[name])
        monkeypatch.setenv(name, "http://127.0.0.1:9" if name == "AWS_ENDPOINT_URL" else "another's")
    assert S3Store(f"s3://{BUCKET}/{server}").get("own") == b"value"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)


def test_answers_that_break_off_and_busy_servers_are_asked_again(scripted: Server, keys: None) -> None:
    cut = 200, {"Content-Length": "5"}, b"wh"
    scripted.plan = [cut, (503, {}, b""), cut]
    assert S3Store("s3://runs/x", scripted.url).get("key") == b"whole"
    scripted.plan = [cut, (500, {}, b""), (429, {}, b"")]
    assert UrlStore({"key": f"{scripted.url}/key?secret=1"}, {}).get("key") == b"whole"
    assert not scripted.plan


def test_a_server_that_is_not_there_is_said_without_its_secrets(
    scripted: Server, keys: None, caplog: pytest.LogCaptureFixture
) -> None:
    """urllib3 logs the URL, whose query is a signature."""
    caplog.set_level("DEBUG")
    with pytest.raises(EnvironmentFailure):
        S3Store("s3://runs/x", "http://127.0.0.1:9", hasty=True).get("key")
    url = f"{scripted.url}/key?X-Amz-Signature=secret"
    assert UrlStore({"key": url}, {}, 5.0).get("key") == b"whole"
    with pytest.raises(EnvironmentFailure) as error:
        UrlStore({"key": url.replace(scripted.url, "http://127.0.0.1:9")}, {}, 5.0).get("key")
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
    assert "rounds/00002/1-COMMITTED" in kept and not any("updates" in key or "assignments" in key for key in kept)
    # On another machine, with nothing but the store.
    Path("runs/bucket").rename("gone")
    assert (
        run(Resolved.load(None, (*quick, *remote)), "bucket", Attempt(resume=True)).model_sha256 == bucket.model_sha256
    )


def test_create_repeats_a_request_that_meets_another_one(store: S3Store, proxy: Proxy) -> None:
    """That request may be an earlier try of the same, or fail."""
    answers, hasty = list[int](), S3Store(store.uri(), proxy.address, hasty=True)
    proxy.fault = lambda verb, _: answers.pop(0) if answers and verb == "PUT" else None
    answers += [409]
    assert hasty.create("key", b"mine") and store.get("key") == b"mine"
    answers += [409, 412]
    assert not hasty.create("key", b"another's")
    answers += [409, 409]
    assert not hasty.create("key", b"another's"), "a server that answers 409 for a key that exists"
    answers += [409, 409]
    with pytest.raises(Busy):
        hasty.create("another", b"mine")


@pytest.mark.parametrize("verb", ["POST", "PUT"])
def test_results_of_a_pod_arrive_by_post_and_by_put(server: str, verb: Verb, tmp_path: Path) -> None:
    """A PUT has the signed length, so a shorter result is padded."""
    store, assignment = S3Store(f"s3://runs/{tmp_path.name}"), PLAN.assignments[1]
    ledger, key = Mailbox(store, key=key_of(b"secret"), lease=LEASE), key_of(b"secret")(assignment)
    keys = dict(zip(ledger.result_keys(0, 1), (payload_bytes(assignment), manifest_bytes(assignment)), strict=True))
    writes = {name: store.upload(name, size, 60, verb) for name, size in keys.items()}
    told = AssignmentMessage(round=0, clients=(1,), writes=writes)
    pod = Mailbox(told.open(), key=lambda _: key, lengths=told.lengths, lease=LEASE)
    pod.put_result(PLAN, ClientUpdate(0, 1, assignment.spec, {"w": torch.arange(4.0)}, 1, {}))
    found = ledger.receive(PLAN, 1)
    assert isinstance(found, ClientUpdate) and found.payload["w"].tolist() == [0, 1, 2, 3]
    sizes = {name: len(store.get(name)) for name in keys}
    assert sizes == keys if verb == "PUT" else all(sizes[name] < keys[name] for name in keys)

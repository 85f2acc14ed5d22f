"""The run's key: created once, stored where no client's URL reaches, never lost or replaced."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3.session
import numpy as np
import pytest

from fl_engine.aggregation import privacy
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import FolderStore, Store, sha256
from flexfleet.config import load_config
from flexfleet.files.artifacts import RunFile
from flexfleet.pipeline import __main__ as steps
from flexfleet.pipeline import keys
from flexfleet.pipeline.keys import IN_RUN, SIZE, InSecret, InStore
from flexfleet.pipeline.prepare import Resolved
from tests.harness.moto_server import moto
from tests.harness.prepared import prepare
from tests.harness.processes import refused
from tests.k8s import fake

KEY = bytes(range(SIZE))
PRIVATE = ("algorithm.aggregation={name: private, noise_multiplier: 0.1}", "rounds.norm_bound=null")
Step = Callable[..., Any]


def record(key: bytes) -> RunFile:
    of_key = {"key_at": "the Secret there/a-keys", "key_sha256": sha256(key)}
    return RunFile(run_id="a", config={}, numerics={}, pool_sha256="", partition_sha256="", **of_key)


class Dying:
    """Wraps a cluster or store; calls that change something raise after so many."""

    def __init__(self, inner: Any, left: int, killed: type[BaseException]) -> None:
        self.inner, self.left, self.killed = inner, left, killed

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("create", "put", "delete"):
            return found

        def write(*given: Any) -> Any:
            if self.left == 0:
                raise self.killed
            self.left -= 1
            return found(*given)

        return write


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with fake.serving(fake.Cluster(tmp_path / "cluster")) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield Cluster("flexfleet-clients")


@pytest.mark.parametrize("kind", ["file", "Secret"])
def test_kill_at_any_write_loses_no_key(
    kind: str, cluster: Cluster, tmp_path: Path, killed: type[BaseException]
) -> None:
    for writes in range(2):
        root, label = tmp_path / f"{writes}", f"a{writes}"

        def start(left: int, known: RunFile | None, root: Path = root, label: str = label) -> bytes:
            there = InSecret(Dying(cluster, left, killed), label)  # type: ignore[arg-type]
            here = InStore(Dying(FolderStore(root), left, killed), IN_RUN)  # type: ignore[arg-type]
            return keys.key_of_run(here if kind == "file" else there, known, private=True)

        found = None
        try:
            found = start(writes, None)
        except killed:
            assert writes == 0
        again = start(-1, None)
        assert again == (found or again) and len(again) == SIZE
        assert start(-1, record(again)) == again


@pytest.mark.parametrize("how", ["gone", "another", "half", "no base64", "no key"])
def test_wrong_or_missing_key_is_refused_and_not_replaced(how: str, cluster: Cluster) -> None:
    place = InSecret(cluster, "a")
    if how in ("another", "half"):
        place.create(bytes(SIZE) if how == "another" else KEY[:16])
    elif how != "gone":
        meta = {"name": "a-keys", "namespace": "flexfleet-clients"}
        data = {"key": "?"} if how == "no base64" else {"another": "AAAA"}
        cluster.create("secrets", {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
    kept = cluster.get("secrets", "a-keys")
    with pytest.raises(IntegrityError, match="a-keys"):
        keys.key_of_run(place, record(KEY), True)
    assert cluster.get("secrets", "a-keys") == kept


def placed(*sets: str, store: Store | None = None) -> keys.Place:
    return keys.place(load_config(None, sets), "a", store or FolderStore("runs/a"), Path("runs/a"))


def test_place_of_the_key_follows_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = socket.gethostname()
    assert str(placed()) == f"{tmp_path}/runs/a/secret/key on {here}"
    assert str(placed("run.remote=s3://runs/x")) == f"{tmp_path}/runs/a/secret/key on {here}", "not in the bucket"
    assert str(placed("run.secrets=mine")) == f"{tmp_path}/mine/a/key on {here}"
    pods = ("run.backend=kubernetes", "run.remote=s3://runs/x", "kubernetes.namespace=there")
    assert str(placed(*pods, "run.secrets=mine")) == f"{tmp_path}/mine/a/key on {here}"
    found = str(placed(*pods, store=S3Store("s3://runs/x/a")))
    assert re.fullmatch("the Secret there/a-[0-9a-f]{6}-keys", found)
    monkeypatch.setenv("FLEXFLEET_SECRETS_AWS_ACCESS_KEY_ID", "own")
    monkeypatch.setenv("FLEXFLEET_SECRETS_AWS_SECRET_ACCESS_KEY", "secret")
    assert str(placed(*pods, "run.secrets=s3://safe/keys/")) == "s3://safe/keys/a/key"
    assert str(placed("run.remote=ledgers", "run.secrets=safe")).startswith(f"{tmp_path}/safe/a/key")


@pytest.mark.parametrize(
    ("sets", "environment"),
    [
        (["run.secrets=s3://safe/x"], {"ACCESS_KEY_ID": None}),
        (["run.secrets=s3://safe/x"], {"SECRET_ACCESS_KEY": None}),
        (["run.secrets=s3://safe/x"], {"ACCESS_KEY_ID": "runs"}),
        (["run.secrets=s3://runs/keys", "run.remote=s3://runs/x"], {}),
        (["run.secrets=s3://runs/keys", "run.remote=s3://runs/x"], {"ENDPOINT_URL": "http://s3/"}),
        (["run.secrets=ledgers/keys", "run.remote=ledgers"], {}),
        (["run.secrets=https://me:pw@host/x"], {}),
    ],
)
def test_place_that_clients_may_reach_is_refused(
    sets: list[str], environment: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "runs", "AWS_ENDPOINT_URL": "http://s3"}.items():
        monkeypatch.setenv(name, value)
    for name, given in {"ACCESS_KEY_ID": "own", "SECRET_ACCESS_KEY": "secret", **environment}.items():
        if given is None:
            monkeypatch.delenv(f"FLEXFLEET_SECRETS_AWS_{name}", raising=False)
        else:
            monkeypatch.setenv(f"FLEXFLEET_SECRETS_AWS_{name}", given)
    with pytest.raises(ConfigError):
        placed(*sets)


def test_bucket_of_keys_has_its_own_credentials_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address may be the run's, but the credentials and the session token may not."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "runs")
        monkeypatch.setenv(f"FLEXFLEET_{name}", "runs")
    monkeypatch.setenv("FLEXFLEET_SECRETS_AWS_ACCESS_KEY_ID", "own")
    monkeypatch.setenv("FLEXFLEET_SECRETS_AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3:1")
    for address in ("http://s3:1", "http://other:2"):
        place = placed("run.secrets=s3://safe/keys", "run.remote=s3://runs/x")
        assert isinstance(place, InStore) and isinstance(place.store, S3Store)
        url = place.store.presign(place.key, 60)
        assert url.startswith(f"{address}/safe/keys/a/key?") and "Credential=own%2F" in url and "Token" not in url
        assert "Credential=runs%2F" in S3Store("s3://runs/x").presign("key", 60)
        monkeypatch.setenv("FLEXFLEET_SECRETS_AWS_ENDPOINT_URL", "http://other:2")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, quick: Sequence[str]) -> Path:
    return prepare(Resolved.load(None, quick), tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def rounds(step: Step, prepared: Path, quick: Sequence[str]) -> Step:
    """Run two rounds of a private run."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[privacy]'")

    def run(out: Path, *argv: str, sets: Sequence[str] = ()) -> Any:
        given = ("--partition", f"{prepared}/partition", "--pool", f"{prepared}/pool", "--out", str(out), *argv)
        settings = ("rounds.commit_every=1", "rounds.stop=2", *PRIVATE)
        return step(steps.main, "federate", *given, sets=[*quick, *settings, *sets])

    return run


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Buckets `runs` and `safe`, and credentials for each."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "runs")
        monkeypatch.setenv(f"FLEXFLEET_SECRETS_{name}", "safe")
    with moto() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client = boto3.session.Session(region_name="us-east-1").client("s3")
        for name in ("runs", "safe"):
            client.create_bucket(Bucket=name)
        yield client


def objects_of(client: Any, bucket: str) -> dict[str, bytes]:
    listed = client.list_objects_v2(Bucket=bucket).get("Contents", ())
    return {item["Key"]: client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read() for item in listed}


@pytest.mark.long
def test_private_run_resumes_on_another_machine(rounds: Step, bucket: Any, tmp_path: Path) -> None:
    sets = ["run.remote=s3://runs/keys-x", "run.secrets=s3://safe/keys"]
    rounds(tmp_path / "whole" / "a", sets=sets).ok()
    (key,) = objects_of(bucket, "safe").values()
    assert not [name for name, value in objects_of(bucket, "runs").items() if key in value]
    sets[0] = "run.remote=s3://runs/keys-y"
    assert rounds(tmp_path / "one" / "b", sets=[*sets, "rounds.stop=1"]).code == 0
    rounds(tmp_path / "two" / "b", "--resume", sets=sets).ok()
    file = RunFile.read(tmp_path / "two" / "b" / "run.json")
    assert (file.key_at, file.noise_stream) == ("s3://safe/keys/b/key", privacy.STREAM)
    assert model(tmp_path / "two" / "b") != model(tmp_path / "whole" / "a"), "another run has another key"
    assert rounds(tmp_path / "one" / "b", "--resume", sets=sets).code == 0
    assert model(tmp_path / "one" / "b") == model(tmp_path / "two" / "b")


@pytest.mark.long
def test_private_run_warns_of_a_copy_on_another_machine(
    rounds: Step, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    assert rounds(first, sets=["rounds.stop=1"]).code == 0
    shutil.copytree(first, copy)
    for out, stop, warned in ((first, 2, False), (copy, 2, True), (copy, 3, False)):
        caplog.clear()
        assert rounds(out, "--resume", sets=[f"rounds.stop={stop}"]).code == 0
        assert ("docs/guides/privacy.md" in caplog.text) == warned
    assert RunFile.read(copy / "run.json").ledger_at == f"{copy} on {socket.gethostname()}"


def test_private_run_records_the_numerics_of_its_noise(rounds: Step, tmp_path: Path) -> None:
    assert rounds(tmp_path / "a", sets=["rounds.stop=1"]).code == 0
    file = RunFile.read(tmp_path / "a" / "run.json")
    found = file.noise_numerics
    assert found is not None and found["numpy"] == np.__version__ and set(found) > {"log", "cos", "sin", "sqrt"}
    file.model_copy(update={"noise_numerics": {**found, "log": "another"}}).write(tmp_path / "a" / "run.json")
    assert "cannot produce bit-identical results" in refused(rounds(tmp_path / "a", "--resume"), 6)
    assert rounds(tmp_path / "a", "--resume", "--accept-numerics").code == 0


def test_private_runs_of_one_name_share_a_key_and_no_noise(rounds: Step, tmp_path: Path) -> None:
    sets = [f"run.secrets={tmp_path}/keys", "rounds.stop=1"]
    assert rounds(tmp_path / "one" / "a", sets=sets).code == 0
    assert rounds(tmp_path / "two" / "a", sets=sets).code == 0
    first, second = (RunFile.read(tmp_path / folder / "a" / "run.json") for folder in ("one", "two"))
    assert first.key_sha256 == second.key_sha256 and first.token != second.token
    assert model(tmp_path / "one" / "a") != model(tmp_path / "two" / "a")


def test_key_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    InStore(FolderStore(tmp_path), IN_RUN).create(KEY)
    file = tmp_path / IN_RUN
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)

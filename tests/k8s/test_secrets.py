"""Secrets are planted wherever somebody may have them, then looked for wherever somebody else may look.

Passwords in addresses, S3's credentials, the keys of a run's clients, signatures of presigned URLs: none may be in what
a command prints, in a run's folder, in MLflow, in the bucket, in the cluster (but in its Secrets), in a compiled
pipeline or a report.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3.session
import pytest

from fl_engine.aggregation import privacy
from fl_engine.core.errors import masked
from flexfleet.config import load_config, public
from flexfleet.tracking import record as track
from tests.harness import postgres
from tests.harness.mlflow_server import serving
from tests.harness.moto_server import opened

PASSWORD = "pl4nted/pa@ss"
"""With what people forget to quote in an address."""
QUOTED = PASSWORD.replace("/", "%2F").replace("@", "%40")
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKPL4NTEDACCESS",
    "AWS_SECRET_ACCESS_KEY": "pl4nted+secret/access",
    "AWS_SESSION_TOKEN": "pl4nted-session-token",
}
PLANTED = (b"pl4nted", b"AKPL4NTED")
SIGNATURE = re.compile(rb"X-Amz-(?:Signature|Credential|Security-Token)=[^&\s\"'\\]{8}")
UI, STUDY = f"https://me:{PASSWORD}@ui.example", f"postgresql://me:{quote(PASSWORD)}@host/studies"


def found_in(places: Mapping[str, bytes], secrets: Iterable[bytes] = PLANTED) -> list[str]:
    """Return where a secret is, in plain text or in base64, with what is around it."""
    wanted = [form for secret in secrets for form in (secret, base64.b64encode(secret).rstrip(b"=")[:-1])]
    hits = []
    for place, content in places.items():
        spots = [content.find(secret) for secret in wanted] + [m.start() for m in SIGNATURE.finditer(content)]
        hits += [f"{place}: {content[max(0, at - 80) : at + 20]!r}" for at in spots if at >= 0]
    return hits


def files_of(folder: Path) -> dict[str, bytes]:
    """Read every file. SQLite stores texts in plain text."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and a temporary home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(autouse=True)
def _planted(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(f"FLEXFLEET_{name}", f"{value}-own")
    for name, text in {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, text)
    for name, text in {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("fl_engine.storage.s3.ATTEMPTS", 1)


Shown = Callable[..., dict[str, bytes]]


@pytest.fixture
def shown(scratch: Path, caplog: pytest.LogCaptureFixture) -> Shown:
    """`shown(*commands)`: what they printed, the files of the current folder, and everything that was logged, also by
    MLflow's client and boto3."""
    caplog.set_level(logging.INFO)

    def of(*done: Any) -> dict[str, bytes]:
        printed = {f"output {i}": f"{each.out}\n{each.err}".encode() for i, each in enumerate(done)}
        # moto's server runs in this process and is not the one that is listened to.
        log = "\n".join(r.getMessage() for r in caplog.records if r.name != "werkzeug").encode()
        return {**printed, **files_of(scratch), "log": log}

    return of


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[tuple[str, Path]]:
    """Address (with a password) and folder of MLflow's own server, which requires no password."""
    folder = tmp_path_factory.mktemp("mlflow-server")
    with serving(folder, mlflow_template) as port:
        yield f"http://me:{QUOTED}@127.0.0.1:{port}", folder


@pytest.fixture
def addresses(mlflow_server: tuple[str, Path]) -> tuple[str, ...]:
    return (f"tracking.mlflow={mlflow_server[0]}", f"tune.storage={STUDY}")


def test_tracked_run_leaves_no_secret(
    flexfleet: Any, quick: tuple[str, ...], addresses: tuple[str, ...], mlflow_server: tuple[str, Path], shown: Shown
) -> None:
    sets = [*quick, *addresses]
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    assert done.code == 0, done.err
    assert done.json["mlflow_run_id"]  # stdout is the object alone: MLflow's client prints nothing there
    more = [flexfleet("run", "--run-id", "a", "--resume", sets=[*sets, "rounds.stop=4"])]
    more += [flexfleet(*argv) for argv in (("status", "runs/a"), ("report", "runs/a"), ("status", "--json"))]
    assert [each.code for each in more] == [0] * len(more)
    assert any((mlflow_server[1] / "artifacts").rglob("report.html"))
    assert not found_in(shown(done, *more) | files_of(mlflow_server[1]))
    config = load_config(None, sets)
    assert not found_in({"card": track.card(config, "a", "runs/a").encode()})


def test_password_of_a_database_is_nowhere(
    flexfleet: Any, quick: tuple[str, ...], no_drawings: None, shown: Shown
) -> None:
    """The database accepts, refuses or does not answer."""
    pytest.importorskip("psycopg", reason="psycopg, PostgreSQL's driver, is not installed (the extra `dev` has it)")
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install --no-install-recommends postgresql)")
    with postgres.serving() as server:
        server.execute("CREATE DATABASE studies")  # MLflow and Optuna call a table of both alike
        own = ("tune.trials=1", "tune.held_out=[]", "rounds.stop=1", f"tune.storage={server.url(database='studies')}")
        sets = [*quick[1:], f"tracking.mlflow={server.url()}", *own]
        wrong = [*sets, f"tune.storage={server.url('admin:pl4nted-wrong')}"]
        done = [flexfleet("run", "--json", "--run-id", "a", sets=sets), flexfleet("tune", "--id", "t", sets=sets)]
        refused = flexfleet("tune", "--id", "u", sets=wrong)
        kept = {name: server.texts(name) for name in ("postgres", "studies")}
        server.stop()
        away = flexfleet("tune", "--id", "t", "--resume", sets=sets)
    assert [each.code for each in (*done, refused, away)] == [0, 0, 6, 6], [each.err for each in (*done, refused, away)]
    assert done[0].json["mlflow_run_id"].encode() in kept["postgres"] and b"training" in kept["studies"]
    assert not found_in(shown(*done, refused, away) | kept)


UNREACHABLE = f"http://me:{QUOTED}@127.0.0.1:9"
FAILING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "MLflow is not there": (("run",), (f"tracking.mlflow={UNREACHABLE}",)),
    "MLflow is no address": (("run",), (f"tracking.mlflow=nonsense://me:{PASSWORD}@host",)),
    "a study's database is not there": (("tune", "--id", "t"), (f"tune.storage=mysql://me:{PASSWORD}@127.0.0.1:9/x",)),
    "what ODBC is told": (("run",), (f"tracking.mlflow=mssql+pyodbc:///?odbc_connect=PWD%3D{QUOTED}",)),
    "a store with a password": (("run",), (f"run.remote=s3://me:{PASSWORD}@bucket/prefix",)),
    "an S3 server that is not there": (("run",), ("run.remote=s3://runs/x",)),
    "a DVC remote with a password": (("run",), (f"publish.dvc=s3://me:{PASSWORD}@bucket/x",)),
    "data of a repository": (("check",), (f"dataset.root=https://me:{QUOTED}@127.0.0.1:9/repo@v1:data",)),
    "a wrong value": (("check",), (f"seed=https://me:{PASSWORD}@host",)),
    "no YAML": (("check",), (f"tracking.mlflow=[https://me:{PASSWORD}@host",)),
    "a run that MLflow does not know": (("fetch", "0" * 32), (f"tracking.mlflow={UNREACHABLE}",)),
    "Kubeflow is not there": (("submit", "train", "--host", UNREACHABLE), ()),
}


@pytest.mark.parametrize("case", FAILING)
def test_failed_command_shows_no_secret(
    case: str, flexfleet: Any, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, no_drawings: None, shown: Shown
) -> None:
    argv, sets = FAILING[case]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    done = flexfleet(*argv, sets=[*quick, "rounds.stop=1", "run.patience_s=1", *sets])
    assert done.code in (2, 6) and done.err.rstrip().splitlines()[-1].startswith("error: "), done.err
    assert not found_in(shown(done))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (UI, "https://ui.example"),
        (STUDY, "postgresql://host/studies"),
        (UNREACHABLE, "http://127.0.0.1:9"),
        ("https://me:a@b@host/x", "https://host/x"),
        ("https://token@host:8080/repo@v1:data", "https://host:8080/repo@v1:data"),
        ("https://host:8080/repo@v1:data", "https://host:8080/repo@v1:data"),
        ("https://host:8080", "https://host:8080"),
        ("sqlite:///folder@home/mlflow.db", "sqlite:///folder@home/mlflow.db"),
    ],
)
def test_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert masked(address) == shown
    config = load_config(None, [f"tracking.mlflow={json.dumps(address)}"])
    assert public(config).tracking.mlflow == shown
    assert public(load_config(None)) == load_config(None), "nothing else changes"


def test_compiled_pipeline_holds_no_secret() -> None:
    from pipelines import compile as compiler  # takes seconds

    assert not found_in({name: compiler.compiled(name).encode() for name in compiler.PIPELINES})


BUCKET = "looked-through"
"""Of these tests alone: servers in one process share their buckets."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of a server that takes the planted credentials."""
    with opened(monkeypatch, BUCKET, KEYS):
        yield boto3.session.Session().client("s3")


def objects_of(client: Any) -> dict[str, bytes]:
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    return {item["Key"]: client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in listed}


def test_run_in_a_cluster_leaves_no_secret(
    flexfleet: Any, quick: tuple[str, ...], addresses: tuple[str, ...], bucket: Any, mlflow_server: tuple[str, Path],
    cluster: Any, shown: Shown, no_drawings: None,
) -> None:  # fmt: skip
    """Includes the run's key and what follows from it: clients' keys, noise and the choice of clients."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[privacy]'")
    pods: dict[str, bytes] = {}

    def script(job: Any, index: int, before: int) -> str:
        pods[f"{job['metadata']['name']}-{index}-{before}"] = json.dumps(job["spec"]["template"]).encode()
        return "run"

    cluster.script = script
    backend = ("run.backend=kubernetes", f"run.remote=s3://{BUCKET}/x")
    backend += ("kubernetes.image=i", "kubernetes.clients_per_pod=3", "rounds.stop=1")
    backend += ("algorithm.aggregation={name: private}", "rounds.norm_bound=null")
    done = flexfleet("run", "--json", "--run-id", "a", sets=[*quick[1:], *addresses, *backend])
    assert done.code == 0, done.err + "\n".join(cluster.logs)
    kept = objects_of(bucket)
    sealed = [body for body in cluster.created if body["kind"] == "Secret"]
    (own,) = [body for body in sealed if body["metadata"]["name"].endswith("-keys")]
    key = base64.b64decode(own["data"]["key"])
    told_pods = [text for body in sealed if body is not own for text in body["stringData"].values()]
    derived = [json.loads(text)["key"] for text in told_pods]
    assert derived and SIGNATURE.search(json.dumps(sealed).encode()), "what is looked for is there"
    seen = {f"{b['kind']} {b['metadata']['name']}": json.dumps(b).encode() for b in cluster.created if b not in sealed}
    seen |= {f"log {i}": text.encode() for i, text in enumerate(cluster.logs)}
    places = seen | pods | kept | shown(done) | files_of(mlflow_server[1])
    assert pods and len(cluster.logs) == len(pods) and len(kept) >= 5
    noise = privacy.noise_key(key, json.loads(kept["x/a/site/run.json"])["token"])
    seed, plan = privacy.noise_seed(noise, 0), privacy.plan_seed(noise)
    assert seed is not None and len(key) == 32
    raw = (key, noise, seed, plan.to_bytes(32, "little"), plan.to_bytes(32, "big"))
    secrets = (*PLANTED, str(plan).encode(), *(form for s in raw for form in (s, s.hex().encode())))
    assert not found_in(places, (*secrets, *(text.encode() for text in derived)))
    pods_see = {f"told {i}": text.encode() for i, text in enumerate(told_pods)}
    assert not [s for s in secrets[len(PLANTED) :] if any(s in text for text in pods_see.values())]

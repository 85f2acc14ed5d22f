"""`flexfleet run`: what it prints, what it goes on with, and what of a damaged run or of another machine it refuses."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, IntegrityError, Stopped
from fl_engine.storage.store import sha256
from flexfleet.api.results import load
from flexfleet.config import Config
from flexfleet.config.run_names import LONGEST, new_name, plain
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_folder import folder_lock
from flexfleet.pipeline import federate
from flexfleet.pipeline import run as run_module
from flexfleet.pipeline.prepare import Resolved
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

RESULT = {
    "schema_version", "run_id", "status", "metrics", "bytes", "waste", "seconds", "model_sha256", "store_uri",
    "mlflow_run_id", "report",
}  # fmt: skip


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------------------------------------------------- run
def test_a_run_prints_exactly_one_json_object(finished: Any) -> None:
    run, done = finished
    assert done.out.count("\n") == 1
    found = done.json
    assert found.keys() == RESULT
    assert found == json.loads((run / "result.json").read_text())
    assert found["schema_version"] == 1
    assert found["run_id"] == "a"
    assert found["status"] == "finished"
    assert {"avg", "full", "levels"} <= found["metrics"].keys()
    levels = found["metrics"]["levels"]
    assert list(levels) == ["M1", "M2", "M3"]
    assert found["metrics"]["avg"] == pytest.approx(sum(levels.values()) / 3)
    assert found["metrics"]["full"] == levels["M3"]
    assert found["bytes"].keys() == {"down", "up"}
    assert found["waste"] == pytest.approx(1 - found["bytes"]["up"] / found["bytes"]["down"])
    assert found["model_sha256"] == sha256((run / "model.safetensors").read_bytes())
    assert found["mlflow_run_id"] is None
    assert Path(found["store_uri"]).is_absolute()
    assert found["report"].endswith("report.html")


def test_the_configuration_is_params_yaml_of_the_current_folder(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "params.yaml").write_text("partition: {clients: 2000}\n")
    (tmp_path / "other.yaml").write_text("partition: {clients: 4}\n")
    assert "2000" in refused(flexfleet("check"))
    assert flexfleet("check", "--config", "other.yaml").code == 0
    assert flexfleet("check", "--set", "partition.clients=4").code == 0
    assert "nowhere.yaml" in refused(flexfleet("check", "--config", "nowhere.yaml"))


def test_a_run_that_exists_is_not_overwritten(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, _ = finished
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    text = refused(flexfleet("run", "--json", "--run-id", "a", sets=quick))
    assert "runs/a" in text
    assert "--resume" in text
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_resumed_finished_run_prints_the_same(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    _, done = finished
    again = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, "rounds.commit_every=1"])
    assert again.json | {"store_uri": ""} == done.json | {"store_uri": ""}


def test_rounds_whose_settings_are_lost_are_not_taken_for_others(
    flexfleet: Any, finished: Any, quick: Sequence[str]
) -> None:
    run, _ = finished
    (run / "run.json").unlink()
    before = (run / "pool" / "pool.json").read_bytes()
    done = flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, "seed=5"])
    assert done.code == 4 and "runs/a/run.json" in done.err
    assert (run / "pool" / "pool.json").read_bytes() == before
    with pytest.raises(IntegrityError, match=r"run\.json is missing"):  # the step alone
        federate.federate(Resolved.load(None, quick), run / "partition", run / "pool", run, run_id="a", resume=True)


def test_a_resume_with_another_parameter_is_refused(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    for given, named in (
        ("training.lr=0.01", "training.lr: 0.05 -> 0.01"),
        ("seed=5", "seed: 0 -> 5"),
        ("algorithm.kd_weight=0", "algorithm.kd_weight: None -> 0"),
        ("partition.alpha=0.1", "partition.alpha: 0.6 -> 0.1"),
    ):
        assert named in refused(flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, given]))


def test_a_resume_may_change_what_moves_no_bit(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    sets = [*quick, "rounds.stop=4", "rounds.commit_every=auto", "rounds.keep_updates=true", "run.devices=[cpu, cpu]"]
    more = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=sets)
    assert more.code == 0
    whole = flexfleet("run", "--json", "--run-id", "b", sets=[*quick, "rounds.stop=4"])
    assert more.json["model_sha256"] == whole.json["model_sha256"]
    assert more.json["metrics"] == whole.json["metrics"]
    assert more.json["bytes"] == whole.json["bytes"]


# ------------------------------------------------------------------------------------------- integrity: exit 4
def flip(path: Path) -> None:
    value = bytearray(path.read_bytes())
    value[len(value) // 2] ^= 1
    path.write_bytes(value)


@pytest.mark.parametrize(
    "name", ["state.safetensors", "state.json", "metrics.json", "COMMITTED", "../00000/metrics.json"]
)
def test_a_damaged_checkpoint_is_named_and_got_over_when_told_to(
    flexfleet: Any, finished: Any, quick: Sequence[str], name: str
) -> None:
    run, done = finished
    path = run / "rounds" / "00002" / name
    if name == "COMMITTED":
        path.write_bytes(path.read_bytes()[:20])
    else:
        flip(path)
    named = path.resolve().relative_to(Path.cwd()).as_posix()
    text = refused(flexfleet("run", "--json", "--run-id", "a", "--resume", sets=quick), 4)
    assert named in text
    assert "--discard-damaged" in text
    good = flexfleet("run", "--json", "--run-id", "a", "--resume", "--discard-damaged", sets=quick)
    assert good.code == 0, good.err
    assert good.json["model_sha256"] == done.json["model_sha256"]
    assert good.json["metrics"] == done.json["metrics"]
    assert flexfleet("run", "--json", "--run-id", "a", "--resume", sets=quick).code == 0


def test_a_run_is_not_begun_again_where_its_rounds_are_not(
    flexfleet: Any, finished: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    run, done = finished
    remote = f"run.remote={tmp_path}/elsewhere"
    text = refused(flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, remote]))
    assert "run.remote" in text
    shutil.copytree(run / "rounds", tmp_path / "elsewhere" / "a" / "rounds")
    again = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, remote])
    assert again.json["model_sha256"] == done.json["model_sha256"], again.err


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def other_json(path: Path) -> None:
    path.write_bytes(b"{}")


def one_byte_more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("run.json", truncate),
        ("pool/pool.json", one_byte_more),
        ("pool/pool.json", remove),
        ("partition/partition.json", other_json),
        ("partition/partition.safetensors", flip),
    ],
)
def test_other_damaged_files_of_a_run_are_named(
    flexfleet: Any, finished: Any, quick: Sequence[str], name: str, damage: Any
) -> None:
    run, _ = finished
    damage(run / name)
    text = refused(flexfleet("run", "--json", "--run-id", "a", "--resume", sets=quick), 4)
    assert Path(name).stem in text


def test_status_of_a_damaged_run_names_the_file(flexfleet: Any, finished: Any) -> None:
    run, _ = finished
    shutil.copytree(run, run.with_name("b"))
    flip(run / "rounds" / "00001" / "metrics.json")
    assert "00001/metrics.json" in refused(flexfleet("status", "runs/a"), 4)
    damaged, sound = flexfleet("status", "--json").json["runs"]
    assert (damaged["run_id"], damaged["status"], damaged["round"]) == ("a", "unreadable", None)
    assert "00001/metrics.json" in damaged["why"]
    assert (sound["run_id"], sound["status"]) == ("b", "finished")  # by the folder, with whose name the copy goes on
    first, second = flexfleet("status").out.splitlines()
    assert first.split()[:2] == ["a", "unreadable"] and "00001/metrics.json" in first
    assert second.split()[:2] == ["b", "finished"] and "round 3/3" in second
    assert flexfleet("status", "runs/b/rounds/..", "--json").json == sound


@pytest.mark.parametrize("where", ["federate", "evaluate", "conclude"])
@pytest.mark.parametrize("more", [False, True])
def test_a_run_that_is_killed_before_its_results_is_not_finished(
    flexfleet: Any, quick: Sequence[str], no_drawings: None, finished: Any, monkeypatch: pytest.MonkeyPatch,
    where: str, more: bool,
) -> None:  # fmt: skip

    def killed(*_: Any, **__: Any) -> None:
        raise Stopped("as by a kill")

    name, module = ("a" if more else "b"), {"federate": federate}.get(where, run_module)
    argv, sets = ("--run-id", name, *(["--resume"] if more else [])), [*quick, f"rounds.stop={4 if more else 1}"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_finish" if where == "federate" else where, killed)
        assert flexfleet("run", *argv, sets=sets).code == 3
    found = flexfleet("status", f"runs/{name}", "--json").json
    assert (found["status"], found["round"]) == ("unfinished", 4 if more else 1)
    loaded = load(Path("runs") / name)
    assert loaded.status == "stopped" and loaded.model_sha256 is None
    if more and where == "federate":
        assert "history.json" in refused(flexfleet("report", "runs/a"), 4)
    assert flexfleet("run", "--run-id", name, "--resume", sets=sets).code == 0
    assert flexfleet("status", f"runs/{name}", "--json").json["status"] == "finished"


# ------------------------------------------------------------------------------------------- numerics: exit 6
def test_resume_with_other_numerics_is_refused_unless_accepted(
    flexfleet: Any, finished: Any, quick: Sequence[str]
) -> None:
    run, done = finished
    numerics = RunFile.read(run / "run.json").numerics
    edit(run / "run.json", numerics=numerics | {"cpu_capability": "ENIAC"})
    text = refused(flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, "rounds.stop=4"]), 6)
    assert "ENIAC" in text
    assert "--accept-numerics" in text
    argv = ("run", "--json", "--run-id", "a", "--resume", "--accept-numerics")
    assert flexfleet(*argv, sets=quick).json["model_sha256"] == done.json["model_sha256"]
    assert flexfleet(*argv, sets=[*quick, "rounds.stop=4"]).code == 0


@pytest.mark.parametrize("command", ["run", "central"])
def test_resume_needs_the_name_of_a_run(command: str, flexfleet: Any) -> None:
    assert "--resume needs --run-id" in refused(flexfleet(command, "--resume"))


GOOD = ("a", "flexfl-s0-20261122-101010", "my run", "größe", "package.module:NAME-s0", "a" * LONGEST, "_x", "a.b")
BAD = (
    "", ".", "..", ".hidden", "-rf", "a/b", "/tmp/x", "a\\b", "a\nb", "a\n", "\ra", "a\tb", "a\0b", "a\x1b[31m", " a",
    "a ", "a\u202eb", "a\u200bb", "a\u2028b", "\ud800", "a" * (LONGEST + 1), "é" * (LONGEST // 2 + 1), "a" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_plain_name_is_taken_as_it_is(name: str) -> None:
    assert plain(name, "run_id") == name


@pytest.mark.parametrize("name", BAD, ids=lambda name: ascii(name)[:20])
def test_what_is_no_plain_name_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(ConfigError, match="run_id is a plain name") as error:
        plain(name, "run_id")
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_runs_of_the_same_second_get_different_names(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, no_drawings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20261122-101010")
    sets = [*quick, "rounds.stop=1", "central.epochs=1"]
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: new_name(Config()), range(64)))) == 64
    names = [flexfleet("central", "--json", sets=sets).json["run_id"] for _ in range(2)]
    assert len({*names, *(path.name for path in Path("runs").iterdir())}) == 2


# ------------------------------------------------------------------------------------------------------ the lock
def test_a_folder_has_one_lock(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(ConfigError, match="another process"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):
        pass


@pytest.mark.long
def test_run_is_published_from_paths_of_any_script(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None
) -> None:
    here, scratch = tmp_path / "Möbel 中文 x", tmp_path / "tmp ü 中"
    for folder in (here, scratch, here / "ß code"):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (here / "ß code" / "rate.py").write_text("RATE = 0.1\n")
    sets = [
        *(text for text in quick if not text.startswith(("tracking.", "run.store"))),
        "run.store=Läufe 中",
        "run.code=ß code/rate.py",
        "tracking.mlflow=sqlite:///möbel 中.db",
        "tracking.experiment=Versuch ü 中",
        "publish.dvc=Ablage ü 中",
        "publish.models=true",
        "rounds.stop=1",
    ]
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    assert done.code == 0, done.err
    fetched = flexfleet("fetch", "--json", done.json["mlflow_run_id"], "--out", "zurück 中", sets=sets)
    assert fetched.code == 0, fetched.err
    model = Path("Läufe 中/a/model.safetensors").read_bytes()
    assert Path("zurück 中/model.safetensors").read_bytes() == model
    assert flexfleet("report", "Läufe 中/a", "--out", "Bericht ü.html").code == 0

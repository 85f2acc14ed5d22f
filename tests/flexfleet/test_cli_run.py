"""`flexfleet run` (its output, resuming, damaged files, other machines) and `flexfleet pool`, a pool without a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, IntegrityError, Stopped
from fl_engine.storage.store import sha256
from flexfleet.api.results import load
from flexfleet.config.run_names import LONGEST, check_name
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_folder import folder_lock
from flexfleet.pipeline import federate
from flexfleet.pipeline import run as run_module
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt
from tests.harness.processes import refused
from tests.harness.run_folders import flip

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

RESULT = {
    "schema_version", "run_id", "status", "metrics", "bytes", "waste", "seconds", "model_sha256", "store_uri",
    "mlflow_run_id", "report", "forecast",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- run
def test_run_prints_one_json_object(finished: Any) -> None:
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


def test_run_reads_params_yaml_of_the_working_directory(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("partition: {clients: 2000}\n")
    (tmp_path / "other.yaml").write_text("partition: {clients: 4}\n")
    assert "2000" in refused(flexfleet("check"))
    assert flexfleet("check", "--config", "other.yaml").code == 0
    assert flexfleet("check", "--set", "partition.clients=4").code == 0
    assert "nowhere.yaml" in refused(flexfleet("check", "--config", "nowhere.yaml"))


def test_existing_run_is_not_overwritten(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, _ = finished
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    text = refused(flexfleet("run", "--json", "--run-id", "a", sets=quick))
    assert "runs/a" in text
    assert "--resume" in text
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_resumed_finished_run_prints_the_same(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    _, done = finished
    again = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, "rounds.commit_every=1"])
    assert again.json | {"store_uri": ""} == done.json | {"store_uri": ""}


def test_rounds_without_run_json_are_refused(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, _ = finished
    (run / "run.json").unlink()
    before = (run / "pool" / "pool.json").read_bytes()
    assert "runs/a/run.json" in refused(flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, "seed=5"]), 4)
    assert (run / "pool" / "pool.json").read_bytes() == before
    with pytest.raises(IntegrityError, match=r"run\.json is missing"):  # the step alone
        federate.federate(
            Resolved.load(None, quick), run / "partition", run / "pool", run, Attempt(resume=True), run_id="a"
        )


@pytest.mark.parametrize("sets", ["training.lr=0.01", "seed=5", "algorithm.kd_weight=0", "partition.alpha=0.1"])
def test_resume_with_another_parameter_is_refused(
    flexfleet: Any, finished: Any, quick: Sequence[str], sets: str
) -> None:
    done = flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, sets])
    assert sets.partition("=")[0] in refused(done)


def test_resume_accepts_settings_that_change_no_bit(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    sets = [*quick, "rounds.stop=4", "rounds.commit_every=auto", "rounds.keep_updates=true", "run.devices=[cpu, cpu]"]
    refused(flexfleet("run", "--run-id", "a", "--resume", sets=[*sets, "run.strategy=single"]), 6)
    sets.append("run.backend=processes")
    more = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=sets)
    assert more.code == 0
    whole = flexfleet("run", "--json", "--run-id", "b", sets=[*quick, "rounds.stop=4"])
    assert more.json["model_sha256"] == whole.json["model_sha256"]
    assert more.json["metrics"] == whole.json["metrics"]
    assert more.json["bytes"] == whole.json["bytes"]


# ------------------------------------------------------------------------------------------- integrity: exit 4
@pytest.mark.parametrize(
    "name", ["state.safetensors", "state.json", "metrics.json", "COMMITTED", "../00000/metrics.json"]
)
def test_damaged_checkpoint_is_named_and_can_be_discarded(
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
    good = flexfleet("run", "--json", "--run-id", "a", "--resume", "--discard-damaged", sets=quick).ok()
    assert good.json["model_sha256"] == done.json["model_sha256"]
    assert good.json["metrics"] == done.json["metrics"]
    assert flexfleet("run", "--json", "--run-id", "a", "--resume", sets=quick).code == 0


@pytest.mark.parametrize("where", ["federate", "evaluate", "conclude"])
@pytest.mark.parametrize("more", [False, True])
def test_run_killed_before_its_results_is_unfinished(
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
    assert flexfleet("run", "--run-id", name, "--resume", sets=sets).code == 0
    assert flexfleet("status", f"runs/{name}", "--json").json["status"] == "finished"


# ------------------------------------------------------------------------------------------- numerics: exit 6
def test_resume_with_other_numerics_is_refused_unless_accepted(
    flexfleet: Any, finished: Any, quick: Sequence[str]
) -> None:
    run, done = finished
    known = RunFile.read(run / "run.json")
    known.model_copy(update={"numerics": known.numerics | {"cpu_capability": "ENIAC"}}).write(run / "run.json")
    text = refused(flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, "rounds.stop=4"]), 6)
    assert "ENIAC" in text
    assert "--accept-numerics" in text
    argv = ("run", "--json", "--run-id", "a", "--resume", "--accept-numerics")
    assert flexfleet(*argv, sets=quick).json["model_sha256"] == done.json["model_sha256"]
    assert flexfleet(*argv, sets=[*quick, "rounds.stop=4"]).code == 0


@pytest.mark.parametrize("command", ["run", "central"])
def test_resume_needs_the_name_of_a_run(command: str, flexfleet: Any) -> None:
    assert "--resume needs --run-id" in refused(flexfleet(command, "--resume"))


@pytest.mark.parametrize("name", ["a", "my run", "größe", "package.module:NAME-s0", "a" * LONGEST, "_x", "a.b"])
def test_plain_name_is_accepted(name: str) -> None:
    assert check_name(name, "run_id") == name


@pytest.mark.parametrize(
    "name", ["", "..", ".hidden", "-rf", "a/b", "a\\b", "a\nb", "a\0b", "a ", "a\u202eb", "\ud800", "a" * (LONGEST + 1)]
)
def test_name_that_is_not_plain_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_name(name, "run_id")
    assert str(error.value).isprintable() and len(str(error.value)) < 400


# ------------------------------------------------------------------------------------------------------ the lock
def test_folder_has_one_lock(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(ConfigError, match="another process"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):
        pass


# --------------------------------------------------------------------------------------------------------- pool
VGG = ("--model", "vgg16", "--input", "3x32x32", "--classes", "10")
POOL = [
    ("--algorithm", "flexfl", *VGG, "--set", "algorithm.use_apoz=false"),
    ("--set", "algorithm.use_apoz=false", *VGG, "--algorithm", "flexfl"),
    ("--set", "algorithm.use_apoz=false", *VGG),
]


@pytest.mark.parametrize("argv", POOL)
def test_pool_of_the_papers_vgg16(flexfleet: Any, argv: tuple[str, ...]) -> None:
    found = flexfleet("pool", "--json", *argv).json
    levels = found["levels"]
    assert [level["name"] for level in levels] == ["M1", "M2'", "M2", "M3'", "M3"]
    assert levels[-1]["params"] == 33_646_666
    for level, percent in zip(levels, (25, 40, 50, 90, 100), strict=True):
        assert {"name", "params", "macs", "flops", "bytes", "widths"} <= level.keys()
        assert level["bytes"] == 4 * level["params"]
        assert abs(100 * level["params"] / 33_646_666 - percent) <= 0.5, level["name"]
        assert len(level["widths"]) == 15, "thirteen convolutions and two hidden layers"
    sizes = [(level["params"], level["flops"], *level["widths"].values()) for level in levels]
    for small, large in pairwise(sizes):
        assert all(a <= b for a, b in zip(small, large, strict=True))


def test_pool_measures_on_the_configured_data(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    found = flexfleet("pool", "--json", sets=quick).json
    assert found["classes"] == 10
    assert found["input_chw"] == [1, 8, 8]
    assert list(tmp_path.iterdir()) == [], "the pool command leaves nothing behind"


def test_pool_takes_measured_scores(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, _ = finished
    done = flexfleet("pool", "--json", "--apoz", str(run / "pretrain" / "apoz.json"), sets=quick)
    file = json.loads((run / "pool" / "pool.json").read_text())
    assert done.json == file | {"levels": [level | {"flops": level["macs"]} for level in file["levels"]]}


@pytest.mark.parametrize(
    "argv",
    [
        VGG,  # flexfl needs APoZ, which needs data
        VGG[:4],
        ("--classes", "10"),
        ("--model", "vgg16", "--input", "3x32", "--classes", "10"),
        ("--model", "vgg16", "--input", "3x32x32", "--classes", "0"),
        ("--model", "vgg61"),
        ("--apoz", "nowhere.json"),
    ],
)
def test_pool_refuses_wrong_options(flexfleet: Any, argv: tuple[str, ...]) -> None:
    done = flexfleet("pool", "--json", *argv)
    assert done.code in (2, 4)
    refused(done, done.code)


CAPACITIES = ("--model", "preresnet18", "--input", "3x32x32", "--classes", "10", "--set",
              "algorithm.widths=[0.0625,0.125,0.25,0.5,1.0]", "--flops-as", "thop")  # fmt: skip
TABLE_3_6 = [(44_510, 2_413_184), (176_178, 9_151_744), (701_018, 35_604_992), (2_796_714, 140_416_000),
             (11_172_170, 557_656_064)]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["fedrolex", "federated_dropout"])
def test_pool_prints_fedrolexs_table_3_6(flexfleet: Any, algorithm: str) -> None:
    """2.978 M parameters, 149.048 M MACs, 11.36 MB: the means over the five capacities."""
    argv = ("pool", "--algorithm", algorithm, *CAPACITIES)
    found = flexfleet(*argv, "--json").json
    assert [(level["params"], level["flops"]) for level in found["levels"]] == TABLE_3_6
    assert found["mean"]["params"] == 2_978_118 and found["mean"]["flops"] == pytest.approx(149_048_396.8)
    assert "2.978 M parameters, 149.048 M MACs, 11.36 MB" in flexfleet(*argv).out

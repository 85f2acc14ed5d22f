"""The console command: what it prints, and the exit code of everything that can go wrong."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fl_engine
from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import Stopped
from fl_engine.datasets import DATASETS, fashion_mnist
from fl_engine.models import export
from fl_engine.rounds import round as rounds
from fl_engine.storage.store import sha256
from fl_engine.training.numerics import flushes_now
from flexfleet import commands
from flexfleet.files.artifacts import PoolFile, RunFile
from flexfleet.steps import evaluate

COMMANDS = ("run", "central", "pool", "report", "fetch", "status", "check", "doctor")
RESULT = {
    "schema_version", "run_id", "status", "metrics", "bytes", "waste", "seconds", "model_sha256", "store_uri",
    "mlflow_run_id", "report",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None) -> None:
    """Else ./params.yaml and ./runs would be those of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)


def refused(done: Any, code: int = 2) -> str:
    """The one line on stderr that an expected error is."""
    assert done.code == code, done.err
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.err
    assert done.err.rstrip().endswith(lines[0]), "an error is one line, and the last"
    return lines[0]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------------------------------- help and version
@pytest.mark.parametrize("argv", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help(flexfleet: Any, argv: list[str]) -> None:
    done = flexfleet(*argv)
    assert done.code == 0
    assert "usage: flexfleet" in done.out
    if argv == ["--help"]:
        assert all(command in done.out for command in COMMANDS)
    else:
        assert "--json" in done.out


def test_version(flexfleet: Any) -> None:
    done = flexfleet("--version")
    assert (done.code, done.out.split()) == (0, ["flexfleet", fl_engine.__version__])


@pytest.mark.parametrize("argv", [[], ["runn"], ["run", "--sett", "a=b"], ["pool", "--classes", "ten"], ["report"]])
def test_a_wrong_command_line_is_bad_input(flexfleet: Any, argv: list[str]) -> None:
    done = flexfleet(*argv)
    assert done.code == 2
    assert "usage: flexfleet" in done.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--silence=nan", "above 0; got nan"),
        ("--silence=-1", "above 0; got -1"),
        ("--silence=0", "above 0; got 0"),
        ("--recycle=-1", "at least 1; got -1"),
        ("--recycle=0", "at least 1; got 0"),
    ],
)
def test_an_agents_numbers_are_refused_at_once(flexfleet: Any, given: str, said: str) -> None:
    done = flexfleet("agent", "--invite", "nowhere.json", given)
    assert done.code == 2 and given.partition("=")[0] in done.err and said in done.err


def without(packages: Sequence[str], *argv: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter in which some packages are not installed."""
    script = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({list(packages)!r})\n"
        "from flexfleet import cli\n"
        f"sys.argv = ['flexfleet', *{list(argv)!r}]\n"
        "cli.main()\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


HEAVY = (
    "onnx", "onnxruntime", "mkdocs", "dp_accounting", "faster_coco_eval", "pytest", "hypothesis",
    "torch", "numpy", "safetensors", "sklearn", "mlflow", "matplotlib", "jinja2", "kfp", "kubernetes", "optuna", "dvc"
)  # fmt: skip


@pytest.mark.parametrize("argv", [("--help",), ("run", "--help"), ("--version",)])
def test_help_and_version_need_nothing_heavy(argv: tuple[str, ...]) -> None:
    done = without(HEAVY, *argv)
    assert done.returncode == 0, done.stderr
    assert "flexfleet" in done.stdout


def test_doctor_says_what_a_bare_installation_lacks() -> None:
    done = without(HEAVY, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == fl_engine.__version__
    assert found["extras"].keys() == {
        "engine", "data", "tracking", "pipeline", "kubernetes", "tune", "export", "privacy", "detection",
        "testing", "run", "docs"
    }  # fmt: skip
    assert set(found["extras"]["engine"]["missing"]) >= {"torch", "safetensors", "numpy"}
    assert all(about["missing"] and about["enables"] for about in found["extras"].values())
    text = without(HEAVY, "doctor")
    assert text.returncode == 0
    assert "pip install 'flexfleet[engine]'" in text.stdout


def test_a_bare_installation_is_told_what_to_install() -> None:
    """`pip install flexfleet` brings no torch: then the first thing that people type must not be a traceback."""
    for argv in (("run", "--json"), ("check",), ("pool", "--json"), ("status",), ("fetch",)):
        done = without(("torch", "numpy", "safetensors"), *argv)
        assert "Traceback" not in done.stderr, f"{argv}: {done.stderr[-300:]}"
        assert done.returncode == 6
        assert "flexfleet[engine]" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "said"),
    [("matplotlib", "flexfleet[tracking]"), ("mlflow", "flexfleet[tracking]"), ("sklearn", "scikit-learn")],
)
def test_a_missing_extra_is_an_environment_error_that_names_it(
    quick: Sequence[str], tmp_path: Path, package: str, said: str
) -> None:
    sets = [part for pair in (*quick, "tracking.mlflow=sqlite:///mine.db") for part in ("--set", pair)]
    done = without((package,), "run", "--json", *sets)
    assert "Traceback" not in done.stderr, done.stderr[-300:]
    assert done.returncode == 6
    assert said in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.rglob("apoz.json")) == [], "said at once, and not after hours of pre-training"


def test_doctor_in_this_environment(flexfleet: Any) -> None:
    found = flexfleet("doctor", "--json").json
    assert "cpu" in found["devices"]
    assert found["extras"]["engine"]["missing"] == []
    assert found["data"].keys() == DATASETS.keys()
    text = flexfleet("doctor")
    assert text.code == 0
    assert "engine" in text.out


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
        assert {"name", "params", "flops", "bytes", "widths"} <= level.keys()
        assert level["bytes"] == 4 * level["params"]
        assert abs(100 * level["params"] / 33_646_666 - percent) <= 0.5, level["name"]
        assert len(level["widths"]) == 15, "thirteen convolutions and two hidden layers"
    sizes = [(level["params"], level["flops"], *level["widths"].values()) for level in levels]
    for small, large in pairwise(sizes):
        assert all(a <= b for a, b in zip(small, large, strict=True))


def test_pool_of_the_authors_resnet34(flexfleet: Any) -> None:
    """With the APoZ scores of their code for CIFAR-10: no data set, and no pre-training."""
    scores = "algorithm.apoz=[0.5686834259, 0.6525205196, 0.6017078438, 0.7603804525, 0.9060739441]"
    argv = ("--model", "resnet34", "--input", "3x32x32", "--classes", "10", "--set", "algorithm.rule=authors")
    levels = flexfleet("pool", "--json", *argv, "--set", scores).json["levels"]
    assert [level["params"] for level in levels] == [6_296_547, 9_689_715, 11_671_306, 20_067_466, 21_578_634]


def test_pool_of_the_control_has_one_model(flexfleet: Any) -> None:
    (level,) = flexfleet("pool", "--json", "--algorithm", "all_large", *VGG).json["levels"]
    assert level["params"] == 33_646_666


def test_pool_as_text(flexfleet: Any) -> None:
    done = flexfleet("pool", *POOL[2])
    assert done.code == 0
    assert "33,646,666" in done.out
    assert "M2'" in done.out


def test_pool_measures_on_the_configured_data(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    found = flexfleet("pool", "--json", sets=quick).json
    assert found["classes"] == 10
    assert found["input_chw"] == [1, 8, 8]
    assert list(tmp_path.iterdir()) == [], "the pool command leaves nothing behind"


def test_pool_takes_measured_scores(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, _ = finished
    done = flexfleet("pool", "--json", "--apoz", str(run / "pretrain" / "apoz.json"), sets=quick)
    assert PoolFile.model_validate(done.json) == PoolFile.read(run / "pool" / "pool.json")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (VGG, "--apoz"),
        (VGG[:4], "--classes"),
        (("--classes", "10"), "--input"),
        (("--model", "vgg16", "--input", "3x32", "--classes", "10"), "3x32"),
        (("--model", "vgg16", "--input", "axbxc", "--classes", "10"), "axbxc"),
        (("--model", "vgg16", "--input", "3x8x8", "--classes", "10"), "8"),
        (("--model", "vgg16", "--input", "3x-32x-32", "--classes", "10"), "-32"),
        (("--model", "vgg16", "--input", "0x32x32", "--classes", "10"), "0"),
        (("--model", "vgg16", "--input", "3x32x32", "--classes", "-1"), "at least 1; got -1"),
        (("--model", "vgg16", "--input", "3x32x32", "--classes", "0"), "at least 1; got 0"),
        (("--model", "vgg61"), "vgg16"),
        (("--apoz", "nowhere.json"), "nowhere.json"),
    ],
)
def test_pool_refuses(flexfleet: Any, argv: tuple[str, ...], said: str) -> None:
    done = flexfleet("pool", "--json", *argv)
    assert done.code in (2, 4)
    assert said in refused(done, done.code)


# -------------------------------------------------------------------------------------------------- bad input
BAD = {
    "unknown parameter": (["partition.alfa=1"], ("partition.alfa", "alpha")),
    "more clients than samples": (["partition.clients=2000", "partition.minimum=1"], ("2000", "clients")),
    "more clients times minimum than samples": (["partition.clients=100"], ("100", "20", "minimum")),
    "alpha of zero": (["partition.alpha=0"], ("alpha", "0")),
    "negative alpha": (["partition.alpha=-0.5"], ("alpha", "-0.5")),
    "too many labels": (["partition.rule=disjoint_labels", "partition.labels_per_client=11"], ("11", "10")),
    "no natural clients": (["partition.rule=natural"], ("digits", "natural")),
    "proxy of everything": (["partition.proxy=1.0"], ("proxy",)),
    "no proxy for APoZ": (["partition.proxy=0"], ("proxy",)),
    "unknown class of the server": (["partition.server_classes=[8,10]"], ("server_classes", "0 to 9", "10")),
    "all classes the server's": (["partition.server_classes=[0,1,2,3,4,5,6,7,8,9]"], ("server_classes", "clients")),
    "Gamma too large": (["algorithm.adaptive_size=30"], ("Gamma", "30", "25")),
    "Gamma below the smallest model": (["algorithm.targets=[4.0, 8.0, 100.0]"], ("Gamma",)),
    "unreachable target": (["algorithm.targets=[0.01, 50.0, 100.0]", "algorithm.epsilon=0.1"], ("0.01 %", "target")),
    "unreachable precision": (["algorithm.epsilon=0.0000001", "algorithm.targets=[33.3, 100.0]"], ("epsilon",)),
    "targets in disorder": (["algorithm.targets=[50.0, 25.0, 100.0]"], ("targets", "ascend")),
    "shares": (["fleet.tiers=[{name: a, share: 0.5, memory: 50.0}]"], ("fleet.tiers", "add up to 1")),
    "a fleet too weak": (
        ["algorithm.name=all_large", "fleet.tiers=[{name: a, share: 1.0, memory: 50.0}]"],
        ("eligible", "full model"),
    ),
    "a fleet too weak for any": (["fleet.tiers=[{name: a, share: 1.0, memory: 20.0}]"], ("smallest model",)),
    "more samples than there are": (["dataset.train_samples=1000000"], ("1000000", "1438")),
    "data set": (["dataset.name=digit"], ("digit", "digits")),
    "padding smaller than the image": (["dataset.pad=4"], ("8 x 8", "4 x 4")),
    "a pool of no tier": (["run.backend=kubernetes", "kubernetes.pools={wek: {}}"], ("kubernetes.pools", "'weak'")),
    "missing files": (["dataset.name=cifar10", "dataset.root=nowhere"], ("nowhere/cifar10", "flexfleet fetch cifar10")),
}


@pytest.mark.parametrize("what", BAD)
def test_check_finds_bad_input(flexfleet: Any, what: str, tmp_path: Path) -> None:
    sets, said = BAD[what]
    text = refused(flexfleet("check", "--json", sets=["tracking.mlflow=null", *sets]))
    assert all(part in text for part in said), text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["unknown parameter", "more clients than samples", "alpha of zero", "Gamma too large"])
def test_a_run_with_bad_input_ends_before_it_starts(
    flexfleet: Any, quick: Sequence[str], what: str, tmp_path: Path
) -> None:
    """Also before pre-training, which may take an hour, and without a folder that would be in the way afterwards."""
    sets, said = BAD[what]
    text = refused(flexfleet("run", "--json", "--run-id", "a", sets=[*quick, *sets]))
    assert all(part in text for part in said), text
    assert list(tmp_path.rglob("apoz.json")) == []
    assert flexfleet("run", "--json", "--run-id", "a", sets=[*quick, "rounds.stop=1"]).code == 0


def test_check_tells_which_tiers_and_levels_fit_nowhere(
    flexfleet: Any, quick: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    tiers = "fleet.tiers=[{name: a, share: 0.5, memory: 20}, {name: b, share: 0.5, memory: 60}]"
    done = flexfleet("check", "--json", sets=[*quick, "algorithm.name=heterofl", tiers])
    assert done.json["ok"]
    assert "a (3 of 6 devices, 20 %)" in caplog.text
    assert "no device can hold 1x (100 %): the strongest holds 60 %" in caplog.text
    caplog.clear()
    widths = "algorithm.widths=[0.0625,0.125,0.25,0.5,1.0]"
    real_world = ["fleet.tiers=real_world", "algorithm.name=fedrolex", widths]
    done = flexfleet("check", "--json", sets=[*quick, *real_world, "partition.clients=20"])
    assert done.json["ok"] and "fleet:" not in caplog.text, "each tier holds what its width takes"


def test_check_of_good_input(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    assert flexfleet("check", "--json", sets=quick).json == {
        "ok": True, "dataset": "digits", "train": 240, "test": 60, "model": "small_cnn", "algorithm": "flexfl"
    }  # fmt: skip
    assert flexfleet("check", sets=quick).out.startswith("ok: ")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_data_file_is_named(flexfleet: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data" / fashion_mnist.FOLDER
    folder.mkdir(parents=True)
    for name in fashion_mnist.CHECKSUMS:
        (folder / name).write_bytes(gzip.compress(b"not what the checksum says" * 100)[:-9])
    sets = ["dataset.name=fashion_mnist", f"dataset.root={tmp_path / 'data'}"]
    text = refused(flexfleet("check", "--json", sets=sets))
    assert str(folder / "train-images-idx3-ubyte.gz") in text
    assert fashion_mnist.CHECKSUMS["train-images-idx3-ubyte.gz"].removeprefix("md5:") in text
    assert text == refused(flexfleet("run", "--json", sets=[*sets, "tracking.mlflow=null"]))


@pytest.mark.parametrize("run_id", ["a/b", "..", ".hidden", "/tmp/x", "."])
def test_a_run_id_is_a_plain_name(flexfleet: Any, quick: Sequence[str], run_id: str) -> None:
    assert repr(run_id) in refused(flexfleet("run", "--run-id", run_id, sets=quick))


def test_a_device_that_is_not_there_is_an_environment_error(flexfleet: Any, quick: Sequence[str]) -> None:
    for name in ("cuda:99", "quantum"):
        text = refused(flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, f"run.devices=[{name}]"]), 6)
        assert repr(name) in text


def test_a_store_that_cannot_be_written_is_named(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    for store in ("file", "/proc/nowhere"):
        done = flexfleet("run", "--json", "--run-id", "a", sets=[*quick, f"run.store={store}"])
        assert done.code in (2, 6)
        assert store in refused(done, done.code)


def test_a_run_in_which_training_diverges_ends_well(flexfleet: Any, quick: Sequence[str]) -> None:
    """Clients fail, the model stays, the figures say so: that is a result."""
    done = flexfleet("run", "--json", "--run-id", "a", sets=[*quick, "training.lr=1e30", "rounds.stop=2"])
    assert done.code == 0, done.err
    rows = json.loads(Path("runs/a/history.json").read_bytes())["rounds"]
    assert all(row["metrics"]["clients_failed"] == 3 for row in rows)
    assert done.json["bytes"]["up"] == 0
    assert done.json["waste"] == 1


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


def test_a_run_without_json_prints_a_table_and_where_things_are(flexfleet: Any, quick: Sequence[str]) -> None:
    done = flexfleet("run", "--run-id", "b", sets=[*quick, "rounds.stop=1"])
    assert done.code == 0
    assert "flexfl" in done.out
    assert "runs/b/report.html" in done.out
    assert "mlflow" not in done.out.lower()


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


def test_a_run_cannot_go_back(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    assert "rounds.stop" in refused(flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, "rounds.stop=2"]))


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
    assert f"was started with run.remote = None, and with {remote.replace('=', ' = ')} no round is committed" in text
    shutil.copytree(run / "rounds", tmp_path / "elsewhere" / "a" / "rounds")
    again = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*quick, remote])
    assert again.json["model_sha256"] == done.json["model_sha256"], again.err


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


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
        ("run.json", empty),
        ("pool/pool.json", truncate),
        ("pool/pool.json", one_byte_more),
        ("pool/pool.json", remove),
        ("partition/partition.json", other_json),
        ("partition/partition.safetensors", flip),
        ("partition/partition.safetensors", remove),
    ],
)
def test_other_damaged_files_of_a_run_are_named(
    flexfleet: Any, finished: Any, quick: Sequence[str], name: str, damage: Any
) -> None:
    run, _ = finished
    damage(run / name)
    text = refused(flexfleet("run", "--json", "--run-id", "a", "--resume", sets=quick), 4)
    assert Path(name).stem in text


# ------------------------------------------------------------------------------------------- numerics: exit 6
def test_a_machine_that_computes_other_bits_is_refused_unless_accepted(
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


@pytest.mark.parametrize("backend", ["in_process", "processes"])
def test_only_a_run_that_began_without_it_keeps_denormal_numbers(
    flexfleet: Any, finished: Any, quick: Sequence[str], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Where the server plans, averages and evaluates, in the rounds and at the end; and where models are exported."""
    run, _ = finished
    numerics = RunFile.read(run / "run.json").numerics
    edit(run / "run.json", numerics={n: v for n, v in numerics.items() if n != "flush_denormal"})
    seen: dict[str, bool] = {}  # the last time: `check`, before a run, computes nothing that stays

    def noted(what: str, work: Any) -> Any:
        def done(*given: Any, **named: Any) -> Any:
            seen[what] = flushes_now()
            return work(*given, **named)

        return done

    for name in ("init", "plan", "merge"):
        monkeypatch.setattr(FlexFL, name, noted(name, getattr(FlexFL, name)))
    for module in (rounds, evaluate):
        monkeypatch.setattr(module, "evaluate_pool", noted(module.__name__, module.evaluate_pool))
    monkeypatch.setattr(export, "export", noted("export", export.export))
    parts = {"init", "plan", "merge", rounds.__name__, evaluate.__name__, "export"}
    sets = [*quick, f"run.backend={backend}", "publish.models=true", "publish.onnx=false"]
    done = flexfleet("run", "--json", "--run-id", "a", "--resume", sets=[*sets, "rounds.stop=4"])
    assert done.code == 0, done.err
    assert seen == dict.fromkeys(parts, False)
    assert RunFile.read(run / "run.json").numerics["flush_denormal"] is False
    seen.clear()
    assert flexfleet("run", "--run-id", "b", sets=[*sets, "rounds.stop=1"]).code == 0
    assert seen == dict.fromkeys(parts, True)


@pytest.mark.parametrize("command", ["run", "central"])
def test_resume_needs_the_name_of_a_run(command: str, flexfleet: Any) -> None:
    assert "--resume needs --run-id" in refused(flexfleet(command, "--resume"))


def test_a_run_without_a_name_gets_one_without_a_colon(flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def stopped(resolved: Any, run_id: str, **_: Any) -> None:
        named.append(run_id)
        raise Stopped("stopped")

    monkeypatch.setattr("flexfleet.runs.whole.run", stopped)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    assert flexfleet("run", "--algorithm", "fl_engine.algorithms.full_model:AllLarge").code == 3
    (Path("runs") / named[0]).mkdir(parents=True)
    assert flexfleet("run", "--algorithm", "fl_engine.algorithms.full_model:AllLarge").code == 3
    assert named == [f"fl_engine.algorithms.full_model.AllLarge-s0-now{end}" for end in ("", "-2")]


# ------------------------------------------------------------------------------------------- status and others
def test_nothing_found_is_one_line(flexfleet: Any) -> None:
    assert flexfleet("status").out == "runs holds no run yet\n"
    assert len(refused(flexfleet("params", "zzzz"))) < 150
    assert "did you mean 'momentum'" in refused(flexfleet("params", "momentun"))


def test_status(flexfleet: Any, finished: Any, quick: Sequence[str]) -> None:
    run, done = finished
    one = flexfleet("status", "runs/a", "--json").json
    assert one == {
        "run_id": "a", "status": "finished", "round": 3, "stop": 3,
        "avg": done.json["metrics"]["avg"], "full": done.json["metrics"]["full"], "metric": "accuracy",
    }  # fmt: skip
    (run / "history.json").unlink()
    assert flexfleet("status", "runs/a", "--json").json["status"] == "unfinished"
    assert flexfleet("status", "--json").json == {"runs": [one | {"status": "unfinished"}]}
    assert "round 3/3" in flexfleet("status").out
    assert flexfleet("status", "--json", sets=["run.store=elsewhere"]).json == {"runs": []}
    assert "nowhere" in refused(flexfleet("status", "nowhere"))


def test_status_of_a_damaged_run_names_the_file(flexfleet: Any, finished: Any) -> None:
    run, _ = finished
    flip(run / "rounds" / "00001" / "metrics.json")
    assert "00001/metrics.json" in refused(flexfleet("status", "runs/a"), 4)


def test_report_of_what_is_no_run(flexfleet: Any, finished: Any) -> None:
    run, _ = finished
    assert "nowhere" in refused(flexfleet("report", "nowhere"))
    (run / "history.json").unlink()
    assert "--resume" in refused(flexfleet("report", "runs/a"), 4)


def test_fetch_lists_what_there_is(flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("fetch", "--root", str(tmp_path))
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines.keys() == DATASETS.keys()
    assert "there" in lines["digits"]
    assert "missing" in lines["cifar10"]
    part = tmp_path / DATASETS["cifar10"].files[0]
    part.parent.mkdir(parents=True)
    part.touch()
    assert "1 of 6 files" in flexfleet("fetch", "--root", str(tmp_path)).out
    assert "nothing to fetch" in flexfleet("fetch", "digits").out
    assert "did you mean 'cifar10'" in refused(flexfleet("fetch", "cifar"))
    by_hand = refused(flexfleet("fetch", "casas", "--root", str(tmp_path)))
    assert f"expected {tmp_path}/casas/cairo/data" in by_hand
    assert "Download the data sets cairo, milan, " in by_hand


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_the_list_says_what_a_data_set_is_how_large_and_under_what_licence(name: str) -> None:
    about = DATASETS[name].about
    assert re.search(r"classes|categories|activities|gestures|target|the next (character|of [\d,]+ words)", about)
    counted = r"\d,\d{3} \+ [\d,]+\d|\d (people|homes|roles|users)"
    assert re.search(counted, about), "training and test samples, or whose they are"
    assert re.search(r"licen[cs]e|CC BY|terms|public domain", about)
    assert re.search(r"(\d|several) (kB|MB|GB)\b|comes with", about)


def test_what_needs_a_form_says_so_when_it_is_fetched(flexfleet: Any, tmp_path: Path) -> None:
    said = refused(flexfleet("fetch", "epic_sounds", "--root", str(tmp_path)))
    assert "extract_audio.py" in said and str(tmp_path / "epic-sounds" / "audio") in said


@pytest.mark.parametrize("argv", [(), ("digits",)])
def test_fetch_as_json(flexfleet: Any, tmp_path: Path, argv: tuple[str, ...]) -> None:
    found = flexfleet("fetch", *argv, "--root", str(tmp_path), "--json").json
    assert found["datasets"]["digits"] is True
    assert found["about"]["digits"] == DATASETS["digits"].about


# --------------------------------------------------------------------------------------------- other exit codes
def test_an_interruption_is_exit_code_130(flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "doctor", interrupted)
    done = flexfleet("doctor", "--json")
    assert done.code == 130
    assert "Traceback" not in done.err


def test_a_tracking_server_is_named_by_its_address_a_data_base_by_the_command_that_shows_it() -> None:
    assert commands.where_tracked("http://me:secret@mlflow:5000", None) == "MLflow: http://mlflow:5000"
    assert commands.where_tracked("http://mlflow:5000", "https://here") == "MLflow: https://here"
    assert commands.where_tracked("sqlite:///a.db", None) == "MLflow: mlflow ui --backend-store-uri sqlite:///a.db"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "flexfleet.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert fl_engine.__version__ in done.stdout

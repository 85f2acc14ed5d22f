"""The console command: what it prints, and the exit code of everything that can go wrong."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fl_engine
from fl_engine.core.errors import Stopped
from fl_engine.datasets import DATASETS
from flexfleet.cli import host
from flexfleet.files.signals import stopping_at_once
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")


# ------------------------------------------------------------------------------------------- help and version
@pytest.mark.parametrize("argv", [[], ["runn"], ["run", "--sett", "a=b"], ["pool", "--classes", "ten"], ["report"]])
def test_a_wrong_command_line_is_bad_input(flexfleet: Any, argv: list[str]) -> None:
    done = flexfleet(*argv)
    assert done.code == 2
    assert "usage: flexfleet" in done.err


def without(packages: Sequence[str], *argv: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter in which some packages are not installed."""
    script = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({list(packages)!r})\n"
        "from flexfleet.cli import main as cli\n"
        f"sys.argv = ['flexfleet', *{list(argv)!r}]\n"
        "cli.main()\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


HEAVY = (
    "onnx", "onnxruntime", "mkdocs", "dp_accounting", "faster_coco_eval", "h5py", "pytest", "hypothesis",
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
        "testing", "run", "docs", "hdf5"
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


PI_4 = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n"
PI_5 = PI_4.replace("crc32", "crc32 atomics fphp asimdhp")


@pytest.mark.parametrize(
    ("argv", "cpuinfo", "torch", "refused"),
    [
        (("flexfleet.cli.main", "doctor"), PI_4, "2.10.0", True),
        (("flexfleet.cli.main", "agent", "--invite=x"), PI_4, "2.10.0", True),
        (("flexfleet.worker", "--invite=x"), PI_4, "2.10.0", True),
        (("flexfleet.cli.main", "doctor"), PI_4, "2.9.1", False),
        (("flexfleet.cli.main", "doctor"), PI_5, "2.10.0", False),
    ],
    ids=["doctor", "agent", "pod", "older-torch", "newer-processor"],
)
def test_torch_that_would_die_of_sigill_is_not_imported(
    argv: tuple[str, ...], cpuinfo: str, torch: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    script = (
        "import importlib.metadata, pathlib, platform, runpy, sys\n"
        "from fl_engine.core import system\n"
        f"system.CPUINFO = pathlib.Path({str(tmp_path / 'cpuinfo')!r})\n"
        "platform.machine = lambda: 'aarch64'\n"
        f"importlib.metadata.version = lambda name: {torch!r}\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = {list(argv)!r}\n"
        f"runpy.run_module({argv[0]!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode == 6 and "torch==2.9.1" in done.stderr) == refused, done.stderr
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------- bad input
BAD = {
    "unknown parameter": (["partition.alfa=1"], ("partition.alfa", "alpha")),
    "more clients than samples": (["partition.clients=2000", "partition.minimum=1"], ("2000", "clients")),
    "alpha of zero": (["partition.alpha=0"], ("alpha", "0")),
    "no proxy for APoZ": (["partition.proxy=0"], ("proxy",)),
    "Gamma too large": (["algorithm.adaptive_size=30"], ("Gamma", "30", "25")),
    "unreachable target": (["algorithm.targets=[0.01, 50.0, 100.0]", "algorithm.epsilon=0.1"], ("0.01 %", "target")),
    "shares": (["fleet.tiers=[{name: a, share: 0.5, memory: 50.0}]"], ("fleet.tiers", "add up to 1")),
    "a fleet too weak": (
        ["algorithm.name=all_large", "algorithm.eligible=capable", "fleet.tiers=[{name: a, share: 1.0, memory: 50.0}]"],
        ("eligible", "full model"),
    ),
    "more samples than there are": (["dataset.train_samples=1000000"], ("1000000", "1438")),
    "a pool of no tier": (["run.backend=kubernetes", "kubernetes.pools={wek: {}}"], ("kubernetes.pools", "'weak'")),
    "a store that pods cannot reach": (["run.backend=kubernetes"], ("run.remote",)),
    "a DVC remote of another kind": (
        ["publish.dvc=gs://me:secret@bucket/x"],
        ("publish.dvc",),
    ),
    "missing files": (["dataset.name=cifar10", "dataset.root=nowhere"], ("nowhere/cifar10", "flexfleet fetch cifar10")),
}


@pytest.mark.parametrize("what", BAD)
def test_check_finds_bad_input(flexfleet: Any, what: str, tmp_path: Path) -> None:
    sets, said = BAD[what]
    text = refused(flexfleet("check", "--json", sets=["tracking.mlflow=null", *sets]))
    assert all(part in text for part in said), text
    assert list(tmp_path.iterdir()) == []


STOPPED = ("unknown parameter", "more clients than samples", "alpha of zero", "Gamma too large")


@pytest.mark.parametrize("what", [*STOPPED, "a DVC remote of another kind"])
def test_a_run_with_bad_input_ends_before_it_starts(
    flexfleet: Any, quick: Sequence[str], what: str, tmp_path: Path
) -> None:
    sets, said = BAD[what]
    text = refused(flexfleet("run", "--json", "--run-id", "a", sets=[*quick, *sets]))
    assert all(part in text for part in said), text
    assert list(tmp_path.rglob("apoz.json")) == []
    assert flexfleet("run", "--json", "--run-id", "a", sets=[*quick, "rounds.stop=1"]).code == 0


def test_check_of_good_input(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    assert flexfleet("check", "--json", sets=quick).json == {
        "ok": True, "dataset": "digits", "train": 240, "test": 60, "model": "small_cnn", "algorithm": "flexfl"
    }  # fmt: skip
    assert flexfleet("check", sets=quick).out.startswith("ok: ")
    assert list(tmp_path.iterdir()) == []


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


def test_report_of_what_is_no_run(flexfleet: Any, finished: Any) -> None:
    run, _ = finished
    assert "nowhere" in refused(flexfleet("report", "nowhere"))
    (run / "history.json").unlink()
    assert "--resume" in refused(flexfleet("report", "runs/a"), 4)
    (run / "manifest.json").unlink()
    assert "--resume" in refused(flexfleet("report", "runs/a"), 4)


def test_a_short_option_means_all_of_its_word(flexfleet: Any, quick: Sequence[str]) -> None:
    done = flexfleet("run", "--run-id", "a", "--store-uri", "runs #1", sets=[*quick, "rounds.stop=1"])
    assert done.code == 0, done.err
    assert Path("runs #1/a/result.json").is_file()
    assert not Path("runs").exists()


# --------------------------------------------------------------------------------------------- other exit codes
@pytest.mark.long
@pytest.mark.parametrize(
    "argv", [("pool", "--algorithm", "all_large", "--model", "aep_mlp"), ("list", "algorithms", "--json")]
)
def test_a_reader_that_stops_reading_is_no_failure(argv: Sequence[str]) -> None:
    command = [sys.executable, "-m", "flexfleet.cli.main", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert (done.stderr.read(), done.wait()) == (b"", 0)


def test_an_interruption_is_exit_code_130(flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "doctor", interrupted)
    done = flexfleet("doctor", "--json")
    assert done.code == 130
    assert "Traceback" not in done.err


def test_the_module_is_the_command() -> None:
    for module in ("flexfleet", "flexfleet.cli.main"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"flexfleet {fl_engine.__version__}\n")


def test_status_finds_the_runs_of_comparisons_and_studies(
    flexfleet: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished
    for place in ("c/one-s0", "c/two-s0", "s/trials/0-s0", "s/held-out/best-t0-s7"):
        shutil.copytree(run, Path("runs", place))
    for place in ("s/trials/0-s0", "s/held-out/best-t0-s7"):
        for name in ("result.json", "manifest.json"):
            Path("runs", place, name).unlink()
    shutil.rmtree("runs/s/trials/0-s0/rounds")
    Path("runs/c/two-s0/run.json").write_text("torn")
    (Path("runs") / "begun").mkdir()
    assert "runs/begun" in refused(flexfleet("status", "runs/begun"))
    alone = flexfleet("status", "runs/a", "--json").json
    found = flexfleet("status", "--json").json["runs"]
    assert [row["run_id"] for row in found] == ["a", "c/one-s0", "c/two-s0", "s/trials/0-s0", "s/held-out/best-t0-s7"]
    assert found[2]["status"] == "unreadable" and "run.json" in found[2]["why"]
    assert [row | {"run_id": "a"} for row in (found[1], *found[3:])] == [alone] * 3
    assert flexfleet("status", "runs/s", "--json").json == {"runs": found[3:]}
    lines = flexfleet("status", "runs/c").out.splitlines()
    assert [line.split()[:2] for line in lines] == [["c/one-s0", "finished"], ["c/two-s0", "unreadable"]]
    shutil.rmtree(run)
    assert len(flexfleet("status").out.splitlines()) == 4, "a store that holds no run of its own"
    monkeypatch.chdir(run.parent / "s" / "trials")
    assert flexfleet("status", "0-s0", "--json").json | {"run_id": "a"} == alone


def test_fetch_lists_what_there_is(flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("fetch", "--root", str(tmp_path))
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines.keys() == DATASETS.keys()
    assert "there" in lines["digits"]
    assert "missing" in lines["cifar10"]
    assert all(source.address in lines[name] for name, source in DATASETS.items())
    part = tmp_path / DATASETS["cifar10"].files[0]
    part.parent.mkdir(parents=True)
    part.touch()
    assert "1 of 6 files" in flexfleet("fetch", "--root", str(tmp_path)).out
    assert "nothing to fetch" in flexfleet("fetch", "digits").out
    assert "did you mean 'cifar10'" in refused(flexfleet("fetch", "cifar"))
    by_hand = refused(flexfleet("fetch", "casas", "--root", str(tmp_path)))
    assert f"{tmp_path}/casas/cairo/data" in by_hand
    assert "Download the data sets cairo, milan, " in by_hand


@pytest.mark.parametrize("argv", [(), ("digits",)])
def test_fetch_as_json(flexfleet: Any, tmp_path: Path, argv: tuple[str, ...]) -> None:
    found = flexfleet("fetch", *argv, "--root", str(tmp_path), "--json").json
    assert found["datasets"]["digits"] is True
    assert found["about"]["digits"] == DATASETS["digits"].about
    assert found["source"]["digits"] == DATASETS["digits"].address


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_ends_what_is_inside_with_its_own_error(number: signal.Signals, raised: type[BaseException]) -> None:
    ended = False
    with pytest.raises(raised, match="resume it"), stopping_at_once("resume it"):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)  # does not disturb the end
            time.sleep(0.01)
            ended = True
    assert ended

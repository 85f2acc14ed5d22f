"""The command line: its output and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import fl_engine
from fl_engine.backends import BACKENDS
from fl_engine.core.errors import Stopped
from fl_engine.core.system import install_command
from fl_engine.datasets import DATASETS
from flexfleet.cli.listing import LISTS
from flexfleet.files import terminal
from flexfleet.files.doctor import EXTRAS
from flexfleet.files.signals import stopping_at_once
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")


# ------------------------------------------------------------------------------------------- help and version
@pytest.mark.parametrize("argv", [[], ["runn"], ["run", "--sett", "a=b"], ["pool", "--classes", "ten"], ["report"]])
def test_wrong_arguments_are_bad_input(flexfleet: Any, argv: list[str]) -> None:
    done = flexfleet(*argv, "--json")
    assert done.code == 2 and done.json["error"]["code"] == "input"
    assert "usage: flexfleet" in done.err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["compare", "--jbs", "2"], "--jobs"),
        (["run", "--josn=1"], "--json"),
        (["list", "model"], "'models'"),
        (["rum"], "'run'"),
        (["run", "--kd-weight=3"], "flexfleet params kd_weight"),
    ],
)
def test_usage_error_shows_the_command_and_a_hint(flexfleet: Any, argv: list[str], hint: str) -> None:
    done = flexfleet(*argv)
    assert done.code == 2 and hint in done.err.splitlines()[-1]
    assert done.err.startswith("usage: flexfleet" if argv == ["rum"] else f"usage: flexfleet {argv[0]} ")


@pytest.mark.parametrize(
    ("error", "code", "exit_code"), [(KeyboardInterrupt("resume"), "interrupted", 130), (KeyError("bug"), "error", 1)]
)
def test_interrupt_and_bug_are_json_objects(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: str, exit_code: int
) -> None:
    def fail(_: Sequence[str]) -> int:
        raise error

    with pytest.raises((SystemExit, KeyError)):
        terminal.run_main(fail, ["run", "--json"])
    found = json.loads(capsys.readouterr().out)["error"]
    assert (found["code"], found["exit_code"]) == (code, exit_code) and str(error.args[0]) in found["message"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --set rounds.mo", "rounds.mode=buffered rounds.mode=synchronous"),
        ("run --set rounds.mode =", "buffered synchronous"),
        ("run --set algorithm.kd_w", "algorithm.kd_weight="),
        ("compare --algorithms flexfl,hetero", "flexfl,heterofl"),
        ("compare --algorithms flexfl,no_kd = flexf", "flexfl"),
        ("run --algorithm = heterof", "heterofl"),
        ("submit tra", "train"),
        ("list codec", "codecs"),
    ],
)
def test_bash_completes_the_last_word(flexfleet: Any, words: str, expected: str) -> None:
    """Bash passes `=` as a word of its own."""
    script = flexfleet("completion", "bash").out
    given = " ".join(map(repr, ["flexfleet", *words.split()]))
    script += f"COMP_WORDS=({given}) COMP_CWORD={len(words.split())}\n_flexfleet\necho ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert sorted(done.stdout.split()) == expected.split(), done.stderr


@pytest.mark.parametrize("what", LISTS)
def test_list_describes_every_component(flexfleet: Any, what: str) -> None:
    found = flexfleet("list", what, "--json").json[what]
    assert found and all(found.values()) and (what != "backends" or found.keys() == BACKENDS.keys())


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
    "torch", "numpy", "safetensors", "sklearn", "mlflow", "matplotlib", "jinja2", "kfp", "kubernetes", "optuna", "dvc",
    "tensorboard", "wandb", "prometheus_client",
)  # fmt: skip


@pytest.mark.parametrize("argv", [("--help",), ("run", "--help"), ("--version",)])
def test_help_and_version_need_nothing_heavy(argv: tuple[str, ...]) -> None:
    done = without(HEAVY, *argv)
    assert done.returncode == 0, done.stderr
    assert "flexfleet" in done.stdout


def test_doctor_lists_missing_packages() -> None:
    done = without(HEAVY, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == fl_engine.__version__
    assert found["extras"].keys() == EXTRAS.keys()
    assert set(found["extras"]["engine"]["missing"]) >= {"torch", "safetensors", "numpy"}
    assert all(about["missing"] and about["enables"] for about in found["extras"].values())
    text = without(HEAVY, "doctor")
    assert text.returncode == 0
    assert f"{install_command('engine')}\n" in text.stdout


def test_missing_package_names_the_extra_to_install() -> None:
    """Without an extra, torch is not installed: then the first thing that people type must not be a traceback."""
    for argv in (("run", "--json"), ("check",), ("pool", "--json"), ("status",), ("fetch",)):
        done = without(("torch", "numpy", "safetensors"), *argv)
        assert "Traceback" not in done.stderr, f"{argv}: {done.stderr[-300:]}"
        assert done.returncode == 6
        assert install_command("engine") in done.stderr


PI_4 = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n"
PI_5 = PI_4.replace("crc32", "crc32 atomics fphp asimdhp")


@pytest.mark.parametrize(
    ("argv", "cpuinfo", "torch", "refused"),
    [
        (("flexfleet.cli.main", "doctor"), PI_4, "2.10.0", True),
        (("flexfleet.worker", "--invite=x"), PI_4, "2.10.0", True),
        (("flexfleet.cli.main", "doctor"), PI_4, "2.9.1", False),
        (("flexfleet.cli.main", "doctor"), PI_5, "2.10.0", False),
    ],
    ids=["doctor", "pod", "older-torch", "newer-processor"],
)
def test_torch_that_would_die_of_sigill_is_not_imported(
    argv: tuple[str, ...], cpuinfo: str, torch: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    script = (
        "import importlib.metadata, pathlib, platform, runpy, sys, types\n"
        "from fl_engine.core import system\n"
        f"system.CPUINFO = pathlib.Path({str(tmp_path / 'cpuinfo')!r})\n"
        "platform.machine = lambda: 'aarch64'\n"
        f"found, torch = importlib.metadata.distributions, types.SimpleNamespace(version={torch!r})\n"
        "importlib.metadata.distributions = lambda **k: [torch] if k.get('name') == 'torch' else found(**k)\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = {list(argv)!r}\n"
        f"runpy.run_module({argv[0]!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode == 6 and "torch==2.9.1" in done.stderr) == refused, done.stderr
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("code", "sets"),
    [
        ("config.unknown", ["partition.alfa=1"]),
        ("config.unknown", ["rounds.mode=sideways"]),
        ("config.wrong_type", ["rounds.stop=many"]),
        ("partition", ["partition.clients=2000", "partition.minimum=1"]),
        ("config.out_of_range", ["training.fraction=1.5"]),
        ("pool", ["algorithm.targets=[0.01, 50.0, 100.0]", "algorithm.epsilon=0.1"]),
        ("data", ["dataset.name=cifar10", "dataset.root=nowhere"]),
        ("partition", ["partition.proxy=0"]),
        ("pool", ["algorithm.adaptive_size=30"]),
        ("config", ["fleet.tiers=[{name: a, share: 0.5, memory: 50.0}]"]),
        (
            "config",
            [
                "algorithm.name=all_large",
                "algorithm.eligible=capable",
                "fleet.tiers=[{name: a, share: 1., memory: 50.}]",
            ],
        ),
        ("data", ["dataset.train_samples=1000000"]),
        ("config", ["run.backend=kubernetes", "kubernetes.pools={wek: {}}"]),
        ("config", ["run.backend=kubernetes"]),
        ("config", ["publish.dvc=gs://me:secret@bucket/x"]),
    ],
)
def test_check_reports_bad_input_by_code(flexfleet: Any, code: str, sets: list[str], tmp_path: Path) -> None:
    done = flexfleet("check", "--json", sets=["tracking.mlflow=null", *sets])
    refused(done)
    assert done.json["error"]["code"] == code and list(tmp_path.iterdir()) == []


def test_check_of_good_input(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    assert flexfleet("check", "--json", sets=quick).json == {
        "ok": True, "dataset": "digits", "train": 240, "test": 60, "model": "small_cnn", "algorithm": "flexfl"
    }  # fmt: skip
    assert flexfleet("check", sets=quick).out.startswith("ok: ")
    assert list(tmp_path.iterdir()) == []


def test_missing_torch_device_is_an_environment_error(flexfleet: Any, quick: Sequence[str]) -> None:
    for name in ("cuda:99", "quantum"):
        text = refused(flexfleet("run", "--run-id", "a", "--resume", sets=[*quick, f"run.devices=[{name}]"]), 6)
        assert repr(name) in text


# ------------------------------------------------------------------------------------------- status and others
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


def test_report_needs_finished_runs(flexfleet: Any, finished: Any) -> None:
    run, _ = finished
    assert "nowhere" in refused(flexfleet("report", "nowhere"))
    for name in ("result.json", "history.json"):
        (run / "manifest.json").unlink(missing_ok=True)
        (run / name).unlink()
        refused(flexfleet("report", "runs/a"), 4)


# --------------------------------------------------------------------------------------------- other exit codes
@pytest.mark.long
@pytest.mark.parametrize(
    "argv", [("pool", "--algorithm", "all_large", "--model", "aep_mlp"), ("list", "algorithms", "--json")]
)
def test_closed_stdout_is_not_a_failure(argv: Sequence[str]) -> None:
    command = [sys.executable, "-m", "flexfleet.cli.main", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert (done.stderr.read(), done.wait()) == (b"", 0)


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


def test_fetch_lists_data_sets(flexfleet: Any, tmp_path: Path) -> None:
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
    refused(flexfleet("fetch", "cifar"))
    assert f"{tmp_path}/casas/cairo/data" in refused(flexfleet("fetch", "casas", "--root", str(tmp_path)))


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_raises_its_error_once(number: signal.Signals, raised: type[BaseException]) -> None:
    ended = False
    with pytest.raises(raised, match="resume it"), stopping_at_once("resume it"):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)  # does not disturb the end
            time.sleep(0.01)
            ended = True
    assert ended


LOGS = """import logging, warnings
from flexfleet.files import terminal
def main(argv):
    logging.getLogger("flexfleet").info("%s line", "a\\nlog")
    warnings.warn("a warning")
    raise {error}
terminal.run_main(main, [])
"""


@pytest.mark.parametrize(
    ("error", "code"), [("terminal.BadInput('wrong')", 2), ("KeyboardInterrupt()", 130), ("KeyError()", 1)]
)
def test_json_log_format_puts_each_event_on_a_line(error: str, code: int) -> None:
    script, env = LOGS.format(error=error), os.environ | {"FLEXFLEET_LOG_FORMAT": "json"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, lines[0]["message"]) == (code, "a\nlog line")
    assert [line["level"] for line in lines[:2]] == ["info", "warning"] and len(lines) == 3
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


def test_unknown_log_format_is_refused(flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_LOG_FORMAT", "xml")
    assert flexfleet("list", "fleets").code == 2

"""Every command with odd values prints a result, or one line with an expected error.

Nothing trains, and nothing is sent: functions that begin work or connect to a server raise an error instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fl_engine.core.errors import BadInput, ClientError, EnvironmentFailure, IntegrityError
from fl_engine.remote.messages import AssignmentMessage
from fl_engine.storage import s3 as s3_module
from fl_engine.storage.run_files import sum_of
from fl_engine.storage.store import FolderStore
from fl_engine.training.isolation import isolated
from flexfleet.cli import main as cli
from flexfleet.config import Config, flatten
from flexfleet.experiments import executor as executor_module
from flexfleet.experiments import nightly as regress_module
from flexfleet.experiments import tune as tune_module
from flexfleet.kubeflow import submit as submit_module
from flexfleet.pipeline import contributions as contributions_module
from flexfleet.pipeline import forecast as forecast_module
from flexfleet.pipeline import run as run_module
from flexfleet.tracking import dvc_remote as pushed_module
from flexfleet.tracking import server as tracking_module
from flexfleet.worker.execute import prepare
from tests.fuzz.mutations import anything, in_time, json_like, law, texts

CODES = (0, 2, 3, 4, 5, 6, 7)
BEGUN = "the work would have begun"
LIGHT = ("dataset.train_samples=240", "dataset.test_samples=60", "model.width=0.25", "partition.minimum=5",
         "pretrain.epochs=1")  # fmt: skip
"""Settings with which a check takes little time."""


@pytest.fixture(autouse=True)
def _idle(scratch: Path, monkeypatch: pytest.MonkeyPatch, finished_template: Any) -> None:
    def begin(*_: object, **__: object) -> Any:
        raise EnvironmentFailure(BEGUN)

    def refuse(*_: object, **__: object) -> Any:
        raise OSError("no network here")

    for owner, name, value in (
        (run_module, "partition", begin),
        (run_module, "adopt", begin),
        (run_module, "federate", begin),
        (executor_module, "folder_lock", begin),
        (tune_module, "folder_lock", begin),
        (contributions_module, "ThreadPoolExecutor", begin),
        (forecast_module, "profile", begin),
        (regress_module, "execute", begin),
        (regress_module, "check", lambda config: None),  # of a suite: takes seconds, and has tests of its own
        (submit_module, "connected", begin),
        (tracking_module, "Client", begin),
        (pushed_module, "Client", begin),
        (socket.socket, "connect", refuse),
        (socket, "getaddrinfo", refuse),
        (s3_module, "ATTEMPTS", 1),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    shutil.copytree(finished_template[0], scratch / "runs" / "a")
    (scratch / "good.yaml").write_text("seed: 1\n")
    (scratch / "odd.yaml").write_text("seed: 1\nseeed: 2\n")
    (scratch / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (scratch / "mine.py").write_text("raise SystemError('as somebody wrote it')\n")
    (scratch / "typo.py").write_text("def f(:\n")


FILES = ("good.yaml", "odd.yaml", "binary.yaml", "missing.yaml", ".", "runs", "runs/a", "runs/a/run.json", "x" * 300,
         "runs/a/pretrain/apoz.json", "/dev/null", "~nobody-of-this-name", "")  # fmt: skip
PATHS = ("--config", "--apoz", "--shared", "--root", "--prices")
WORDS: dict[str, tuple[str, ...]] = {
    "--algorithms": ("flexfl", "flexfl,all_large", "a=flexfl,b=flexfl", ",", "x", "a=", "shared=flexfl"),
    "--seeds": ("0", "0,1", "0,0", "x", "1e3", "-1", "9" * 5000),
    "--to": ("0.5", "0.4,0.5", "2", "nan", "x"),
    "--jobs": ("1", "2", "0", "-1", "x", "1.5", "9" * 5000),
    "--classes": ("10", "0", "1", "-1", "x", "999999999999999999999", "100000000"),
    "--input": ("1x8x8", "3x32x32", "1x8", "axbxc", "0x0x0", "-1x8x8", "1x99999999x99999999", "1x60000x60000"),
    "--cron": ("0 0 2 * * *", "* * *", ""),
    "--suite": ("digits", "mine", "good.yaml", "binary.yaml", "missing.yaml", "runs", ".yaml"),
    "--out": ("x.html", "x.pdf", "a/b/c.html", "runs", "runs/a/run.json/x.html", ""),
    "--algorithm": ("flexfl", "x", "mine:X", "typo:X", "os:getcwd", "fl_engine.core.types:Device"),
    "--model": ("small_cnn", "vgg16", "x", "mine:X", "typo:X", "fl_engine.core.types:Device"),
    "--param": ("run_id=a", "x=1", "x", "=", "suite=x"),
    "--tag": ("a=b", "a", "=b", ""),
    "--keep": ("30d", "a", "0d", "champion", "x", "a,,30d", ""),
    "--probe": ("0", "0.01", "-1", "nan", "x"),
    "--seconds": ("0.01", "0", "-1", "nan", "x"),
    "--faults": ("drop=0.2", "drop=2", "slow=0.1", "slow=0.1xinf", "x", "nan=nan", ","),
    "pipeline": ("train", "compare", "tune", "nightly", "x"),
    "names": ("digits", "cifar10", "fashion_mnist", "x", "mine:X", "0" * 32),
    "runs": FILES,
    "run": FILES,
}
TRACKING = ("null", "sqlite:///mlflow.db", "http://127.0.0.1:1", "nonsense://x", "''", "7")
NAMES = sorted(set(flatten(Config())) - {"tracking.mlflow", "run.store"})
NAMED = ("model.name", "algorithm.name", "dataset.name")
sets = st.one_of(
    st.tuples(st.sampled_from(NAMES), anything.map(json.dumps)).map("=".join),
    st.tuples(st.sampled_from(NAMED), st.sampled_from((*WORDS["--model"], *WORDS["--algorithm"]))).map("=".join),
    st.sampled_from(TRACKING).map("tracking.mlflow={}".format),
    st.sampled_from(("runs", "none", "s3://x", "runs/a/run.json")).map("run.store={}".format),
    texts(odd=("seed", "=", "x=1", "rounds.stop=2")),
)


def words_for(action: argparse.Action) -> SearchStrategy[list[str]]:
    """Draw the words for an option or a positional argument."""
    name = action.option_strings[-1] if action.option_strings else action.dest
    if action.nargs == 0:
        return st.just([name])
    good = st.just(WORDS.get(name, FILES if name in PATHS else ("a",))[0])
    if name == "--set":
        word: SearchStrategy[str] = sets
    elif name in PATHS:
        word = good | good | st.sampled_from(FILES)
    elif name == "--out":
        word = st.sampled_from(WORDS[name])
    else:
        word = good | good | texts(odd=WORDS.get(name, ("a", "", "..", "a/b", "-x", "x" * 300)))
    if action.option_strings:
        return word.map(lambda value: [f"{name}={value}"])
    return st.lists(word, min_size=action.nargs != "*" and action.nargs != "?", max_size=3 if action.nargs else 1)


def commands() -> dict[str, Sequence[argparse.Action]]:
    (found,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: parser._actions for name, parser in found.choices.items()}


COMMANDS = commands()


@st.composite
def argv(draw: Any) -> list[str]:
    command = draw(st.sampled_from(sorted(COMMANDS)))
    chosen = []
    for action in COMMANDS[command]:
        if action.dest != "help" and (not action.option_strings or action.required or draw(st.booleans())):
            chosen += draw(words_for(action))
    if any(a.dest == "set" for a in COMMANDS[command]):
        light = LIGHT if command not in ("regress", "nightly") else ()
        chosen = [*(f"--set={pair}" for pair in light), *chosen]
        if not any("tracking.mlflow" in word for word in chosen):
            chosen.append("--set=tracking.mlflow=null")
    return [command, *chosen]


def check_end(done: Any, words: Sequence[str]) -> None:
    assert done.code in CODES
    done.out.encode()  # raises for surrogates, which stdout cannot encode
    if done.code == 0:
        if "--json" in words:
            assert isinstance(done.json, dict)
        return
    assert done.code == 5 or done.err.rstrip().splitlines()[-1].startswith("error: "), done.err[-300:]
    if "--json" in words and done.code != 5:
        assert done.json["error"]["exit_code"] == done.code


@law(80)
@given(argv())
def test_command_succeeds_or_raises_an_expected_error(flexfleet: Callable[..., Any], words: list[str]) -> None:
    with isolated(), in_time(60):  # numbers that torch flushes to zero end the draws of hypothesis
        check_end(flexfleet(*words), words)


@law(25)
@given(st.tuples(st.sampled_from(NAMES), anything.map(json.dumps)).map("=".join))
@example("dataset.pad=1000000")
@example("model.width=1e300")
@example("partition.alpha=1e-300")
@example("kubernetes.hostname='{0.__class__}'")
@example("run.devices=['cuda:99999999999999999999']")
@example("seed=" + "9" * 300)
@example("fleet.tiers=[{name: a, share: 1.0, memory: 1e308, sigma: [1e308]}]")
@example("algorithm.targets=[1e-300, 100]")
def test_check_finds_odd_parameters(flexfleet: Callable[..., Any], pair: str) -> None:
    with isolated(), in_time(60):  # numbers that torch flushes to zero end the draws of hypothesis
        check_end(flexfleet("check", sets=[*LIGHT, "tracking.mlflow=null", pair]), ())


@law(8)
@given(st.data())
def test_damaged_site_is_an_expected_error_of_a_worker(
    finished_template: Any, scratch: Path, data: st.DataObject
) -> None:
    """The checksums of the files are right."""
    store, run = FolderStore(scratch / "store"), finished_template[0]
    (site := scratch / "store" / "site").mkdir(parents=True, exist_ok=True)
    for path in (run / "run.json", run / "pool" / "pool.json", *(run / "partition").glob("partition.*[nrs]")):
        shutil.copy(path, site)
    name = data.draw(st.sampled_from(("run.json", "pool.json", "partition.json")), label="file")
    (site / name).write_bytes(data.draw(json_like(json.loads((site / name).read_bytes())), label="content"))
    given = AssignmentMessage(
        round=0, clients=(0,), site={each.name: sum_of(each.read_bytes()) for each in site.iterdir()}
    )
    with in_time(60), suppress(BadInput, ClientError, IntegrityError):
        prepare(given, store, pod=True)

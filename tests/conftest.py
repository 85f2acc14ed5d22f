"""Fixtures that several folders share: a tiny federated job in memory, a quick command line, and real processes."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import itertools
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from fl_engine.core import allowed
from fl_engine.rounds.timing import MEASURED
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import Store
from fl_engine.testing.tiny import measured_alike
from fl_engine.training.isolation import set_repeatable
from flexfleet.cli import main as cli
from flexfleet.files import terminal
from tests.harness import processes
from tests.harness.checkout import checkout as checkout  # a fixture, as the next ones
from tests.harness.comparisons import compared as compared
from tests.harness.comparisons import compared_template as compared_template
from tests.harness.comparisons import quick_comparisons as quick_comparisons
from tests.harness.jobs import DyingStore, Killed, TinyJob
from tests.harness.pictures import not_drawn, skip_pages
from tests.harness.processes import QUICK, Done, ForkServer, with_sets
from tests.harness.selected import pytest_collection_modifyitems as pytest_collection_modifyitems  # hooks
from tests.harness.selected import pytest_ignore_collect as pytest_ignore_collect
from tests.harness.stores import MemoryStore
from tests.harness.wheel import installed as installed  # a fixture
from tests.harness.wheel import wheel as wheel  # a fixture

pytest.register_assert_rewrite("tests.conformance.backend_suite")  # else a failed assertion would not be explained
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine fails no law
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests/cluster")
    group.addoption("--image", default="python:3.11-slim", help="image that clients run in")
    group.addoption("--client-python", metavar="hostpath:DIR", help="folder of the nodes with src/ and venv/")
    group.addoption("--pods-endpoint", metavar="URL", help="what pods call the S3 server")
    group.addoption("--lose-node", metavar="CMD", help="what makes the node $NODE vanish, kubelet and pods (a shell's)")
    group.addoption("--restore-node", metavar="CMD", help="what brings the node $NODE back")


os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its thread changes the environment during tests
PRINT = builtins.print
SET_FOR_GOOD = re.compile(
    "PYTEST_CURRENT_TEST|TORCHINDUCTOR_CACHE_DIR|KMP_.*|"  # pytest, torch, scikit-learn
    # flexfleet.tracking.server.Client
    "FLEXFLEET_MLFLOW_ANSWERED|MLFLOW_(ENABLE_ARTIFACTS_PROGRESS_BAR|SUPPRESS_PRINTING_URL_TO_STDOUT|DISABLE_TELEMETRY|HTTP_REQUEST_.*)"
)
"""Variables that libraries set once for the whole process."""


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session", autouse=True)
def _no_power_cut() -> Iterator[None]:
    """Skip fsync to save time. Other tests check that a store syncs, and in which order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _draw_what_is_looked_at(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw figures only in modules with the mark `pictures`; elsewhere figures contain only their titles."""
    with contextlib.nullcontext() if request.node.get_closest_marker("pictures") else not_drawn():
        yield


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was() -> Iterator[None]:
    """Restore what a run changes: torch's thread count, denormal numbers and deterministic algorithms, signal handlers,
    log levels, allowed imports, and `print`, which concurrent tasks of a pipeline replace."""
    threads, trusted = torch.get_num_threads(), set(allowed.trusted)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    loud = {name: logging.getLogger(name).level for name in ("", "flexfleet", "fl_engine")}
    builtins.print = PRINT
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    yield
    for name, level in loud.items():  # -q and -v set them
        logging.getLogger(name).setLevel(level)
    allowed.trusted.clear()
    allowed.trusted.update(trusted)
    builtins.print = PRINT
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    set_repeatable(False, fill=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _the_environment_stays() -> Iterator[None]:
    """Fail if a test leaves a changed environment variable behind."""
    before = dict(os.environ)
    yield
    changed = {name for name in before | os.environ if before.get(name) != os.environ.get(name)}
    left = sorted(name for name in changed if not SET_FOR_GOOD.fullmatch(name))
    assert not left, f"the environment has changed: {', '.join(left)}"


# ------------------------------------------------------------------------------------------------- in memory
@pytest.fixture(scope="session")
def job() -> TinyJob:
    return TinyJob()


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="session")
def new_store() -> Callable[[], MemoryStore]:
    return MemoryStore


@pytest.fixture(scope="session")
def dying() -> Callable[[Store, int], DyingStore]:
    return DyingStore


@pytest.fixture(scope="session")
def killed() -> type[BaseException]:
    return Killed


@pytest.fixture(scope="session")
def timeless() -> Callable[[Store], list[Any]]:
    """Return the ledger's rows without measured values (seconds, memory), which differ between equal runs."""

    def rows(store: Store) -> list[Any]:
        return [
            (
                row.round,
                {k: v for k, v in row.metrics.items() if not k.startswith(("seconds", "peak_mb", MEASURED))},
                [measured_alike(line) for line in row.clients],
            )
            for row in Checkpoints(store).rows()
        ]

    return rows


@pytest.fixture(scope="session")
def killed_at_writes(timeless: Callable[[Store], list[Any]]) -> Callable[..., MemoryStore]:
    """Return a function that kills `run(store)` before every `step`-th write, runs it again in the same store, and
    compares its result, its ledger and `also(store)` with those of an undisturbed run, whose store it returns."""

    def check(
        run: Callable[[Any], Any], step: int = 1, first: int = 0, also: Callable[[Any], Any] = lambda store: None
    ) -> MemoryStore:
        undisturbed = MemoryStore()
        expected = run(undisturbed), timeless(undisturbed), also(undisturbed)
        for writes in itertools.count(first, step):
            store = MemoryStore()
            try:
                run(DyingStore(store, writes))
            except Killed:
                found = run(store), timeless(store), also(store)
                assert found == expected, f"killed after {writes} writes"
            else:
                break
        assert writes >= first + 3 * step
        return undisturbed

    return check


# ---------------------------------------------------------------------------------------------------- Kubeflow
@pytest.fixture
def kubeflow() -> Iterator[tuple[Any, str]]:
    """A stand-in for Kubeflow Pipelines (tests/pipelines/kubeflow.py), and its address."""
    from tests.pipelines.kubeflow import serving  # imports kfp_server_api

    with serving() as found:
        yield found


# ------------------------------------------------------------------------------------------------- regressions
TINY: dict[str, Any] = {
    "seeds": [0, 1, 2],
    "settings": {
        "partition.seed": 0,
        "dataset.train_samples": 240,
        "dataset.test_samples": 60,
        "partition.clients": 6,
        "partition.minimum": 5,
        "partition.proxy": 0.1,
        "pretrain.epochs": 1,
        "model.width": 0.5,
        "training.fraction": 0.5,
        "training.epochs": 1,
        "rounds.stop": 3,
    },
    "cases": {"quick": {"algorithms": "flexfl", "to": 0.9}},
    "thresholds": {"avg": 0.015, "full": 0.015, "rounds": 0.2, "mb": 0.2, "peak_mb_rounds": 0.3, "pace": 3.0},
}


@pytest.fixture(scope="session")
def tiny_suite() -> dict[str, Any]:
    """A suite that takes seconds."""
    return TINY


# ------------------------------------------------------------------------------------------- the command line
def end_of(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> Done:
    """Run a command in this process as its entry point would. Unexpected exceptions are not caught."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        terminal.run_main(main, argv)
    code = end.value.code
    return Done(code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def quick() -> tuple[str, ...]:
    return QUICK


@pytest.fixture(scope="session")
def flexfleet() -> Callable[..., Done]:
    """`flexfleet("run", "--json", sets=[...])` in this process, in the current folder."""

    def run(*argv: str, sets: Sequence[str] = ()) -> Done:
        return end_of(cli.dispatch, with_sets(argv, sets))

    return run


@pytest.fixture
def unstopped() -> Iterator[None]:
    """Ignore SIGTERM and SIGHUP, which would end the tests."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def step() -> Callable[..., Done]:
    """`step(main, "--out", "x", sets=[...])`: a step's own command line in this process."""

    def run(main: Callable[[Sequence[str]], int], *argv: str, sets: Sequence[str] = ()) -> Done:
        return end_of(main, with_sets(argv, sets))

    return run


# -------------------------------------------------------------------------------------------- real processes
@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with processes.fork_server() as found:
        yield found


@pytest.fixture(scope="session")
def python(fork_server: ForkServer) -> Path:
    """A script that replaces `python` and saves the seconds for importing torch."""
    return fork_server.python


@pytest.fixture
def warm_starts(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork subprocesses from a process that has imported everything."""
    monkeypatch.setattr(sys, "executable", str(python))


# ----------------------------------------------------------------------------------------------------- MLflow
@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs, to be copied, because MLflow takes seconds to create its tables."""
    import mlflow

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_uri(mlflow_template: Path, tmp_path: Path) -> str:
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder, without the ./params.yaml, ./runs and ./mlruns of the user."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty current folder for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found := tmp_path_factory.mktemp("module"))
        yield found


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pages(monkeypatch)


@pytest.fixture(scope="session")
def finished_template(tmp_path_factory: pytest.TempPathFactory, flexfleet: Callable[..., Done]) -> tuple[Path, Done]:
    cwd = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        done = flexfleet("run", "--json", "--run-id", "a", sets=[*QUICK, "rounds.commit_every=1"])
    assert done.code == 0, done.err
    return cwd / "runs" / "a", done


@pytest.fixture
def finished(
    finished_template: tuple[Path, Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None
) -> tuple[Path, Done]:
    """A copy of a finished run as runs/a in a fresh current folder, and what its command printed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_template[0], tmp_path / "runs" / "a")
    return Path("runs/a"), finished_template[1]

"""Fixtures that several folders share: a tiny federated job in memory, a quick command line, and real processes."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.backends import InProcess
from fl_engine.core import allowed, seeds
from fl_engine.core.contracts import Algorithm, Tracker
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.data import heat_map, partitioning
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.fleet.uniformity import MEASURED
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import MemoryStore as MemoryStore
from fl_engine.storage.store import Store, encode, sha256
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import Memory, measured_alike, tiny_pool
from fl_engine.training.isolation import set_repeatable
from flexfleet.cli import main as cli
from flexfleet.files import terminal
from flexfleet.pipeline import run as run_module
from tests.harness.comparisons import compared as compared  # a fixture, as the next two
from tests.harness.comparisons import compared_template as compared_template
from tests.harness.comparisons import quick_comparisons as quick_comparisons
from tests.harness.pictures import not_drawn
from tests.harness.processes import QUICK, Done, Nursery, with_sets
from tests.harness.selected import pytest_collection_modifyitems as pytest_collection_modifyitems  # hooks
from tests.harness.selected import pytest_ignore_collect as pytest_ignore_collect
from tests.harness.stores import Writing
from tests.harness.warm import warm
from tests.harness.wheel import installed as installed  # a fixture
from tests.harness.wheel import wheel as wheel  # a fixture

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
    # client_of
    "MLFLOW_(ENABLE_ARTIFACTS_PROGRESS_BAR|SUPPRESS_PRINTING_URL_TO_STDOUT|DISABLE_TELEMETRY|HTTP_REQUEST_.*)"
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
class Killed(BaseException):
    """Simulates SIGKILL. The engine must not catch it."""


class DyingStore(Writing):
    """Passes `writes` puts and deletions on to `inner`, and raises Killed at the next one."""

    def __init__(self, inner: Store, writes: int) -> None:
        super().__init__(inner, self._die)
        self.left = writes

    def _die(self, what: str, key: str) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


class Remembering:
    """A backend that records each (round, client), and caches the outcomes of equal assignments, so that hundreds of
    killed runs need not train hundreds of times."""

    durable = False

    def __init__(self, inner: InProcess) -> None:
        self.inner = inner
        self.asked: list[tuple[int, int]] = []
        self._known: dict[tuple[Any, ...], Outcome] = {}

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        for order in plan.orders:
            self.asked.append((plan.round, order.client))
            key = (plan.round, order.client, order.seed, order.spec, sha256(encode(order.payload)))
            if key not in self._known:
                (self._known[key],) = self.inner.run(algorithm, replace(plan, orders=(order,)))
            yield self._known[key]


class TinyJob:
    """FlexFL with six clients of ten random 1x8x8 images each, two clients per round. A round takes milliseconds."""

    seed = 3

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def part(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.from_numpy(rng.integers(0, 256, (samples, 1, 8, 8), dtype=np.uint8))
            return x, torch.arange(samples) % 3

        self.data = Data("tiny", Classification(3), *part(64), *part(20), (0.5,), (0.3,))
        self.family = SmallCNN((1, 8, 8), 3, width=0.25)
        self.partition = partitioning.partition(self.data, "iid", 6, 0.0625, self.seed, minimum=10)
        tiers = (Tier("weak", 0.5, 60.0, (8.0,)), Tier("strong", 0.5, 110.0, (8.0,)))
        self.fleet = devices.fleet(tiers, 6, self.seed)
        self.algorithm = FlexFL(
            Training(fraction=0.34, epochs=1, batch_size=5, lr=0.05),
            targets=(50.0, 100.0),
            adaptive_size=30.0,
            epsilon=5.0,
            use_apoz=False,
        )
        self.pool = tiny_pool(self.algorithm, self.family)
        self.site = Site(self.family, self.pool, self.fleet, self.data, self.partition, self.seed)
        self.backend = Remembering(self.make_backend())

    def make_backend(self, on: tuple[str, ...] = ("cpu",)) -> InProcess:
        return InProcess(self.site, on)

    def initial(self) -> Any:
        start = initial_params(self.family, seeds.derive(self.seed, "init"))
        return self.algorithm.init(start, self.family.layout(), self.fleet, self.pool, ServerSite(self.site))

    def federate(
        self,
        store: Store,
        should_stop: Callable[[], bool] = lambda: False,
        discard_damaged: bool = False,
        tracker: Tracker | None = None,
        backend: Any = None,
        **config: Any,
    ) -> bytes:
        """Run or resume the job in `store`, and return the final model's bytes."""
        # Evaluation does not change the model and takes longer than training here, so only the last round evaluates.
        settings = RoundsConfig(**({"stop": 4, "evaluate_every": 1000, "commit_every": 1} | config))
        self.backend.asked.clear()
        state = rounds.federate(
            Run(self.algorithm, self.site, settings),
            self.initial(),
            backend or self.backend,
            ledger_in(store, settings.keep_every),
            tracker or Memory(),
            should_stop=should_stop,
            discard_damaged=discard_damaged,
        )
        return encode(state.params)


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
    "thresholds": {"avg": 0.015, "full": 0.015, "rounds": 0.2, "mb": 0.2, "peak_mb_rounds": 0.3, "pace": 0.35},
}


@pytest.fixture(scope="session")
def tiny_suite() -> dict[str, Any]:
    """A suite that takes seconds."""
    return TINY


@pytest.fixture(scope="session")
def untimed_suite() -> dict[str, Any]:
    """The same suite without a limit on pace, which depends on the load of the machine."""
    return {**TINY, "thresholds": {**TINY["thresholds"], "pace": 100.0}}


# ----------------------------------------------------------------------------------------------------- dvc.yaml
@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path) -> Iterator[Any]:
    """A copy of the checkout without git, with a short job, as an open DVC repository. Stages run the code of the
    original checkout (tests/harness/warm.py), so only DVC sees edits of the copy."""
    import yaml
    from dvc.repo import Repo

    root, project = tmp_path / "checkout", Path(__file__).parents[1]
    for folder in ("fl_engine", "flexfleet", "components"):
        shutil.copytree(project / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project / "dvc.yaml", root / "dvc.yaml")
    values = yaml.safe_load((project / "params.yaml").read_text())
    short: dict[str, dict[str, Any]] = {
        "partition": {"clients": 6, "minimum": 10},
        "pretrain": {"epochs": 2},
        "training": {"epochs": 1, "batch_size": 20},
        "rounds": {"stop": 2},
        "tracking": {"mlflow": None},
    }
    for section, changes in short.items():
        values[section].update(changes)
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (root / ".dvcignore").write_text("__pycache__/\n")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    # The `python` of dvc.yaml, as in an activated environment.
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    monkeypatch.chdir(root)
    with Repo.init(".", no_scm=True) as found:
        yield found


# ------------------------------------------------------------------------------------------- the command line
def end_of(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> Done:
    """Run a command in this process as its entry point would. Unexpected exceptions are not caught."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        terminal.run_main(lambda _: main(argv))
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
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    found = Nursery(tmp_path_factory.mktemp("nursery"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def python() -> Iterator[Path]:
    """A script that replaces `python` and saves the seconds for importing torch."""
    with warm() as script:
        yield script


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


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawings, which take most of a quick run's time and have their own tests."""

    def page(runs: Sequence[Path], out: Path) -> Path:
        out.write_text("<html></html>")
        return out

    monkeypatch.setattr(run_module, "report", page)
    monkeypatch.setattr(heat_map, "draw", lambda *_: None)


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

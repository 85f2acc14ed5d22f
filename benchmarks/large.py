"""Measure a round with a large model: memory in each stage, seconds, and bytes written to the store.

`benchmarks.growth --model` runs all points in separate processes, because peak memory is measured per process. The
network is an MLP whose five hidden layers hold nearly all parameters. Each client trains one step on four
samples.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from fl_engine.aggregation.rules import Mean, Median
from fl_engine.aggregation.server_opt import FedAdam
from fl_engine.algorithms import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.backends.processes import Processes
from fl_engine.codecs import Half, Qsgd
from fl_engine.core.contracts import Algorithm, ServerContext
from fl_engine.core.costs import count_params
from fl_engine.core.system import resident_peak, restart_peak
from fl_engine.core.types import FULL, Axis, ClientResult, Codecs, ParamLayout, Prunable, RoundPlan, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import Memory, start_of, tiny_data, tiny_fleet, tiny_site

INNER = 5
"""Number of matrices of size hidden x hidden in the network."""
SAMPLES = 4


@dataclass(frozen=True)
class WideMLP:
    """MLP with ReLU. The layers have the widths 64, `hidden` (INNER + 1 layers) and `outputs`."""

    hidden: int
    input_shape: tuple[int, int, int] = (1, 8, 8)
    outputs: int = 4

    min_hw: ClassVar[int] = 1

    @staticmethod
    def of(megabytes: float) -> WideMLP:
        """Return a network whose float32 weights take `megabytes` MB, with an error of at most one percent."""
        return WideMLP(round(math.sqrt(megabytes * 1e6 / 4 / INNER)))

    def layout(self) -> ParamLayout:
        inside, slots = FREE, {}
        for name in self._hidden():
            slots |= linear_slots(name, name, inside, Axis("hidden"))
            inside = Axis("hidden")
        slots |= linear_slots("out", "out", inside, Axis("classes"))
        return ParamLayout({"hidden": self.hidden, "classes": self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        hidden, classes = (self.layout().width(spec, group) for group in ("hidden", "classes"))
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        inside = math.prod(self.input_shape)
        for name in self._hidden():
            layers |= {name: nn.Linear(inside, hidden), f"{name}_relu": nn.ReLU()}
            inside = hidden
        layers["out"] = nn.Linear(hidden, classes)
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        names = self._hidden()
        return (Prunable("hidden", tuple(f"{n}." for n in names), tuple(f"{n}_relu" for n in names)),)

    def _hidden(self) -> tuple[str, ...]:
        return tuple(f"hidden{i}" for i in range(INNER + 1))


# ------------------------------------------------------------------------------------------------- the stages
class Stages:
    """Measures the peak resident memory of this process in bytes for each stage of a round."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._now: str | None = None

    def enter(self, name: str | None) -> None:
        if self._now is not None:
            self.peaks[self._now] = max(resident_peak(), self.peaks.get(self._now, 0))
        restart_peak()
        self._now = name


class SeenStore(FolderStore):
    """Store that counts written bytes, and detects the current stage of a round by the keys that are written or read.
    Workers get a `FolderStore` without these measurements."""

    def __init__(self, root: Path, stages: Stages) -> None:
        super().__init__(root)
        self.stages, self.written, self._put = stages, 0, set[str]()

    def __reduce__(self) -> Any:
        return FolderStore, (self.root,)

    def put(self, key: str, value: Any) -> None:
        if key.endswith("plan.json"):
            self.stages.enter("assignments")
        super().put(key, value)
        self._put.add(key)
        self.written += (self.root / key).stat().st_size

    def get(self, key: str, limit: int | None = None) -> Any:
        if "/updates/" in key:
            self.stages.enter("updates")
            self.written += (self.root / key).stat().st_size if key not in self._put else 0
        return super().get(key, limit)


class SeenBackend:
    """Backend that records when training begins and when updates are received."""

    def __init__(self, inner: Any, stages: Stages) -> None:
        self.inner, self.stages, self.durable = inner, stages, inner.durable

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        results = self.inner.run(algorithm, plan)
        while True:
            self.stages.enter("train")
            result = next(results, None)
            self.stages.enter("updates")
            if result is None:
                return
            yield result
            del result


_seen = Stages()
"""Memory peaks of the current measurement. A global, because fields of the algorithm are copied to workers."""


@dataclass(frozen=True)
class SeenAvg(FedAvg):
    def merge(
        self, state: PooledState, plan: RoundPlan, results: Iterable[ClientResult], server: ServerContext
    ) -> PooledState:
        _seen.enter("merge")
        found = super().merge(state, plan, results, server)
        _seen.enter("evaluate")
        return found


class SeenCheckpoints(Checkpoints):
    def commit(self, *args: Any) -> None:
        self.store.stages.enter("commit")  # type: ignore[attr-defined]
        super().commit(*args)
        self.store.stages.enter(None)  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------- one point
METHODS: Mapping[str, tuple[Mapping[str, Any], Codecs]] = {
    "mean": ({}, Codecs()),
    "clip": ({"aggregation": Mean(clip=0.01)}, Codecs()),
    "median": ({"aggregation": Median()}, Codecs()),
    "adam": ({"server": FedAdam()}, Codecs()),
    "half": ({}, Codecs(Half(), Half())),
    "qsgd": ({}, Codecs(Qsgd(), Qsgd())),
}
"""Map the name of each method to the fields of FedAvg and the codecs with which its run is configured."""


def point(megabytes: float, clients: int, way: str, stop: int = 2, method: str = "mean") -> dict[str, float]:
    """Measure a run of `stop` rounds. After the first round, the memory of the initial model is freed.

    Args:
        megabytes: Size of the model.
        clients: Number of clients. All clients train in each round.
        way: "process" trains all clients in this process and stores their updates. "workers" starts two workers.
        stop: Number of rounds.
        method: Key of METHODS.

    Returns:
        For each stage, the peak resident memory of this process above `mb_before`, in multiples of the model's size.
        The stage `start` creates the initial model.
        The values `mb_model`, `mb_before`, `mb_peak` (all stages) and `mb_worker` (the larger worker) are in MB of 1e6
        bytes. The values per round are `written` (bytes in multiples of the model's size), `seconds` (wall clock) and
        `cpu_s` (CPU seconds of this process).
    """
    prepare_process(("cpu",))
    family = WideMLP.of(megabytes)
    fleet = tiny_fleet(clients, sigma=(0.0,))
    training = Training(fraction=1.0, epochs=1, batch_size=SAMPLES, lr=0.01, momentum=0.0, weight_decay=0.0)
    fields, codecs = METHODS[method]
    algorithm = SeenAvg(training=training, **fields)
    data = tiny_data(family.input_shape, family.outputs, clients)
    site = tiny_site(algorithm, family, sizes=(SAMPLES,) * clients, fleet=fleet, data=data)
    model = 4 * count_params(family)
    with tempfile.TemporaryDirectory(prefix="flexfleet-large-") as folder:
        store = SeenStore(Path(folder) / "run", _seen)
        ledger = Ledger(store, rules=site.rules)
        ledger.checkpoints = SeenCheckpoints(store)
        inner = InProcess(site) if way == "process" else Processes(site, ("cpu", "cpu"))
        before, _ = restart_peak()
        first = [start_of(algorithm, site)]
        peaks = {"start": resident_peak()}
        run = Run(algorithm, site, RoundsConfig(stop=stop, evaluate_every=1, keep_updates=True), codecs=codecs)
        started, spent = time.perf_counter(), time.process_time()
        rounds.federate(run, first.pop(), SeenBackend(inner, _seen), ledger, Memory())
        found = {"seconds": (time.perf_counter() - started) / stop, "cpu_s": (time.process_time() - spent) / stop}
        peaks |= _seen.peaks
        if isinstance(inner, Processes):
            found["mb_worker"] = max(peak_of(worker.process.pid) for worker in inner._workers) / 1e6
            inner.close()
    found |= {stage: (peak - before) / model for stage, peak in peaks.items()}
    found |= {"mb_model": model / 1e6, "mb_before": before / 1e6, "mb_peak": max(peaks.values()) / 1e6}
    return {**found, "written": store.written / model / stop}


def peak_of(pid: int | None) -> int:
    """Return the peak resident memory of another process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

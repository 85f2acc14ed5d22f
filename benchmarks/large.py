"""What a round with a large model takes: memory at each stage, seconds, and bytes that the store is given.

`benchmarks.growth --model` makes the sweep. The network is an MLP whose five inner matrices are nearly all of it;
clients take one step on four samples. A point has a process of its own, so that its memory is its own.
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

from fl_engine.aggregation.robust import Median
from fl_engine.aggregation.rules import Mean
from fl_engine.aggregation.server_opt import Adam
from fl_engine.algorithms import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.backends.processes import Processes
from fl_engine.codecs import Half, Qsgd
from fl_engine.core.contracts import Algorithm, ServerContext
from fl_engine.core.costs import count_params
from fl_engine.core.types import FULL, Axis, Codecs, Outcome, ParamLayout, Prunable, RoundPlan, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger, RoundMailbox
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import Memory, start_of, tiny_data, tiny_fleet, tiny_site
from fl_engine.training.memory import resident_peak, restart_peak

INNER = 5
"""Matrices of the network that are hidden x hidden."""
SAMPLES = 4
"""Of each client."""


@dataclass(frozen=True)
class WideMLP:
    """(B, 64) -> hidden, INNER times hidden -> hidden, -> outputs, with ReLU between."""

    hidden: int
    input_shape: tuple[int, int, int] = (1, 8, 8)
    outputs: int = 4

    min_hw: ClassVar[int] = 1

    @staticmethod
    def of(megabytes: float) -> WideMLP:
        """As large as so many MB of float32, to within a percent."""
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
    """The peak of this process's resident memory in each stage of a round, in bytes."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._now: str | None = None

    def enter(self, name: str | None) -> None:
        if self._now is not None:
            self.peaks[self._now] = max(resident_peak(), self.peaks.get(self._now, 0))
        restart_peak()
        self._now = name


class SeenStore(FolderStore):
    """Counts what it is given, and enters the stages that begin with a file. Workers get a plain store."""

    def __init__(self, root: Path, stages: Stages) -> None:
        super().__init__(root)
        self.stages, self.written, self._put = stages, 0, set[str]()

    def __reduce__(self) -> Any:
        return FolderStore, (self.root,)

    def put(self, key: str, value: Any) -> None:
        if key.endswith("plan.json"):
            self.stages.enter("orders")
        super().put(key, value)
        self._put.add(key)
        self.written += (self.root / key).stat().st_size

    def get(self, key: str, limit: int | None = None) -> Any:
        if "/updates/" in key:
            self.stages.enter("updates")
            self.written += (self.root / key).stat().st_size if key not in self._put else 0
        return super().get(key, limit)


class SeenBackend:
    """Tells the time in which clients train from that in which their updates are taken in."""

    def __init__(self, inner: Any, stages: Stages) -> None:
        self.inner, self.stages, self.durable = inner, stages, inner.durable

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        outcomes = self.inner.run(algorithm, plan)
        while True:
            self.stages.enter("train")
            outcome = next(outcomes, None)
            self.stages.enter("updates")
            if outcome is None:
                return
            yield outcome
            del outcome


_seen = Stages()
"""The stages of this process's one point: an algorithm is sent to workers, and has no room for them."""


@dataclass(frozen=True)
class SeenAvg(FedAvg):
    def merge(
        self, state: PooledState, plan: RoundPlan, answers: Iterable[Outcome], server: ServerContext
    ) -> PooledState:
        _seen.enter("merge")
        found = super().merge(state, plan, answers, server)
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
    "adam": ({"server": Adam()}, Codecs()),
    "half": ({}, Codecs(Half(), Half())),
    "qsgd": ({}, Codecs(Qsgd(), Qsgd())),
}
"""FedAvg's fields and the run's codecs, by name."""


def point(megabytes: float, clients: int, way: str, stop: int = 2, method: str = "mean") -> dict[str, float]:
    """`way`: `process`, all clients in this one, with their updates in the store; `workers`, two worker processes. In
    the second round nothing is left of the first model.

    By stage the peak of this process's resident memory above `mb_before`, in models: `start` is making the first one.
    MB of 1e6 bytes: `mb_model`, `mb_before`, `mb_peak` of all stages, and `mb_worker` of the larger worker. Of a round:
    `written`, what the store was given, in models, and seconds by the clock and of the processors (this process's)."""
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
        ledger = Ledger(SeenCheckpoints(store), RoundMailbox(store, site.rules))
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
    """The largest resident memory of another process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

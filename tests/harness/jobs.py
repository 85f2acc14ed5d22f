"""A tiny job whose rounds take milliseconds, a backend that trains each assignment once, and a store that dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.backends import InProcess
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, Tracker
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import ClientResult, RoundPlan
from fl_engine.data import partitioning
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import Store, encode, sha256
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import Memory, tiny_pool
from tests.harness.stores import Writing


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
    """A backend that records each (round, client), and caches the results of equal assignments, so that hundreds of
    killed runs need not train hundreds of times."""

    durable = False

    def __init__(self, inner: InProcess) -> None:
        self.inner = inner
        self.asked: list[tuple[int, int]] = []
        self._known: dict[tuple[Any, ...], ClientResult] = {}

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        for assignment in plan.assignments:
            self.asked.append((plan.round, assignment.client))
            key = (plan.round, assignment.client, assignment.seed, assignment.spec, sha256(encode(assignment.payload)))
            if key not in self._known:
                (self._known[key],) = self.inner.run(algorithm, replace(plan, assignments=(assignment,)))
            yield self._known[key]


class Through:
    """A backend whose results are what `change(plan, results)` makes of those of `inner`."""

    durable = False

    def __init__(
        self, inner: Any, change: Callable[[RoundPlan, Iterator[ClientResult]], Iterable[ClientResult]]
    ) -> None:
        self.inner, self.change = inner, change

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        yield from self.change(plan, self.inner.run(algorithm, plan))


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
        self.partition = dealt(self.data, "iid", 6, 0.0625, self.seed, minimum=10)
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
            Ledger(store, settings.keep_every),
            tracker or Memory(),
            should_stop=should_stop,
            discard_damaged=discard_damaged,
        )
        return encode(state.params)


def dealt(
    data: Data, rule: Any, clients: int, proxy: float, seed: int, clusters: Any = None, owner: Any = None, **more: Any
) -> Partition:
    """Return a partition, with at least one sample for each client unless `more` options say otherwise."""
    config = partitioning.PartitionConfig(rule=rule, clients=clients, proxy=proxy, **{"minimum": 1, **more})
    return partitioning.partition(data, config, seed, clusters, owner)

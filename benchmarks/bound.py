"""Measure the effect of `rounds.norm_bound` on honest runs and on runs in which one of twenty clients is Byzantine.

The Byzantine client is chosen in the same way as by `rounds.faults`, and attacks whenever it gets an assignment. The
attacks of this client assume that it knows the bound and the updates of all other clients. The script takes a quarter
of an hour on one core and writes docs/robustness/bound.json.

Usage:
    FLEXFLEET_DATA=... python -m benchmarks.bound        (resumes after an interruption; finished runs are kept)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from fl_engine.backends import InProcess
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientResult, ClientUpdate, ParamLayout, RoundPlan
from fl_engine.rounds import acceptance, fault_injection
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.acceptance import MovementHistory, measure_movement, size_sent
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import NORM_BOUND
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import Memory
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import initial_state, partition, site_of
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain

STORE = Path("runs/bound")
OUT = Path("docs/robustness/bound.json")
JUST = 0.999

DIGITS = ("rounds.stop=20",)
UNEVEN = (
    "partition.rule=quantity", "partition.alpha=0.1", "partition.minimum=2", "partition.clients=40",
    "training.fraction=0.5", "training.lr=0.03", "rounds.stop=15",
)  # fmt: skip
FASHION = (
    "dataset.name=fashion_mnist", "dataset.train_samples=4000", "dataset.test_samples=2000", "partition.alpha=0.3",
    "partition.clients=40", "training.fraction=0.25", "training.batch_size=20", "training.epochs=1", "model.width=0.5",
    "pretrain.epochs=20", "rounds.stop=15",
)  # fmt: skip
CIFAR = (
    "dataset.name=cifar10", "dataset.train_samples=3000", "dataset.test_samples=1000", "partition.alpha=0.3",
    "training.fraction=0.2", "training.batch_size=20", "training.epochs=1", "model.name=small_cnn", "model.norm=static",
    "pretrain.epochs=5", "rounds.stop=12",
)  # fmt: skip
ALGORITHMS = {"flexfl": ("algorithm.epsilon=5.0",), "heterofl": ("algorithm.name=heterofl",)}
FEW = {"1 client a round": ("training.fraction=0.05", "rounds.stop=40"), "2": ("training.fraction=0.1",)}

Attack = Callable[[float, float, float], float]
"""Function that returns the factor by which the attacker multiplies its update. The arguments are the norm of the
update before the attack, the largest accepted norm of one update, and the largest accepted mean norm."""
ATTACKS: dict[str, Attack] = {
    "change x 90": lambda moved, once, often: 90.0,
    "change x -90": lambda moved, once, often: -90.0,
    "change x 1000": lambda moved, once, often: 1000.0,
    "no change": lambda moved, once, often: 0.0,
    "just below the bound": lambda moved, once, often: JUST * once / moved,
    "just below, turned around": lambda moved, once, often: -JUST * once / moved,
    "all that is taken": lambda moved, once, often: JUST * often / moved,
    "all that is taken, turned around": lambda moved, once, often: -JUST * often / moved,
    "its own change, turned around": lambda moved, once, often: -1.0,
}


@dataclass
class Bad:
    """Backend that replaces the updates of one client by attacks."""

    inner: Backend
    client: int
    attack: Attack
    bound: float
    layout: ParamLayout
    history: MovementHistory = field(default_factory=MovementHistory)
    durable: ClassVar[bool] = False

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        found = list(self.inner.run(algorithm, plan))
        size = size_sent(plan)
        updates = {result.client: result for result in found if isinstance(result, ClientUpdate)}
        moved = {
            client: measure_movement(update, plan.assignment_of[client], self.layout)
            for client, update in updates.items()
        }
        if self.client in updates:
            own, far = moved[self.client], [m for client, m in moved.items() if client != self.client]
            highest = own._replace(weights=float("inf"))
            usual = acceptance.usual_movement(self.history, [*far, highest], size).after(own.steps)
            once = self.bound * usual.weights
            times = self.attack(own.weights, once, once / 2)
            bad = self._changed(updates[self.client], plan, times)
            moved[self.client] = measure_movement(bad, plan.assignment_of[self.client], self.layout)
            found = [bad if result.client == self.client else result for result in found]
        self.history = acceptance.remember(self.history, moved, size)
        yield from found

    def _changed(self, update: ClientUpdate, plan: RoundPlan, times: float) -> ClientUpdate:
        assignment = plan.assignment_of[update.client]
        sent = take(assignment.payload, self.layout, update.spec, have=assignment.spec)
        payload = {
            name: tensor if is_statistic(name) else sent[name] + times * (tensor - sent[name])
            for name, tensor in update.payload.items()
        }
        return replace(update, payload=payload)


def prepared(name: str, settings: tuple[str, ...]) -> tuple[Resolved, Path]:
    """Prepare a run. Return the run's resolved configuration, and the folder with its partition and model pool."""
    found = Resolved.load(None, ("seed=0", "tracking.mlflow=null", "rounds.evaluate_every=100", *settings))
    out = STORE / name
    if not (out / "pool/pool.json").exists():
        partition(found, out / "partition")
        pretrain(found, out / "partition", out / "pretrain")
        model_pool(found, out / "pretrain", out / "pool")
    return found, out


def measured(name: str, settings: tuple[str, ...], bound: float | None, attack: str | None) -> dict[str, Any]:
    """Return the last round's accuracies in %, and the total numbers of updates, rejected updates and attacks."""
    kept = STORE / name / f"{'off' if bound is None else f'{bound:g}'}, {attack or 'honest'}.json"
    with suppress(FileNotFoundError):
        return dict(json.loads(kept.read_text("utf-8")))
    resolved, out = prepared(name, settings)
    found, algorithm = resolved.config, resolved.algorithm
    site = site_of(resolved, out / "partition", out / "pool")
    backend: Backend = InProcess(site)
    clients, one = len(site.fleet), fault_injection.parse("flip=0.05,always")
    bad = next(c for c in range(clients) if fault_injection.fault_of(one, found.seed, 0, c, clients))
    if attack is not None:
        backend = Bad(backend, bad, ATTACKS[attack], bound or NORM_BOUND, site.layout)
    options = found.rounds.model_copy(update={"norm_bound": bound})
    ledger = Ledger(FolderStore(kept.with_suffix("")))
    run = Run(algorithm, site, options, found.run.devices)
    rounds.federate(run, initial_state(resolved, site, out / "pool"), backend, ledger, Memory())
    rows = ledger.checkpoints.rows()
    refused = [line["client"] for row in rows for line in row.clients if "validate" in line.get("failure", "")]
    result = {
        "avg": 100 * rows[-1].metrics["avg"],
        "full": 100 * rows[-1].metrics["full"],
        "updates": sum(line["client"] != bad or attack is None for row in rows for line in row.clients),
        "refused": sum(client != bad or attack is None for client in refused),
        "caught": refused.count(bad) if attack else 0,
        "attacks": sum(line["client"] == bad for row in rows for line in row.clients) if attack else 0,
    }
    kept.write_text(json.dumps(result), encoding="utf-8")
    return result


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {"honest": {}, "attacked": {}}
    data = {"digits": DIGITS, "digits, most with few samples": UNEVEN, "fashion_mnist": FASHION, "cifar10": CIFAR}
    honest = {f"{d} {a}": (*data[d], *ALGORITHMS[a]) for d in data for a in ALGORITHMS}
    honest["digits multibranch"] = (*DIGITS, "algorithm.name=multibranch")
    honest |= {f"digits flexfl {few}": (*DIGITS, *ALGORITHMS["flexfl"], *FEW[few]) for few in FEW}
    print("| | without | with the bound | refused |\n|---|---|---|---|")
    for name, settings in honest.items():
        on = measured(name, settings, NORM_BOUND, None)
        # If no update was rejected, a run without the bound would give the same result, so do not repeat it.
        off = measured(name, settings, None, None) if on["refused"] else on
        found["honest"][name] = {"without": off, "with": on}
        print(f"| {name} | {off['avg']:.1f} | {on['avg']:.1f} | {on['refused']} of {on['updates']} |", flush=True)
    print("| | accuracy | caught | honest ones refused |\n|---|---|---|---|")
    clip = "algorithm.aggregation={name: mean, clip: 0.5}"
    attacked = {name: honest[name] for name in ("digits flexfl", "digits heterofl")}
    attacked["digits flexfl clipped"] = (*honest["digits flexfl"], clip)
    for attack, bound in (("change x 90", None), *((attack, NORM_BOUND) for attack in ATTACKS)):
        for name, settings in attacked.items():
            title = f"{name}, {attack}{'' if bound else ', no bound'}"
            on = found["attacked"][title] = measured(name, settings, bound, attack)
            caught = f"{on['caught']} of {on['attacks']} | {on['refused']} of {on['updates']}"
            print(f"| {title} | {on['avg']:.1f} | {caught} |", flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

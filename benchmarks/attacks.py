"""Measure what Byzantine clients cost, for each attack, aggregation and algorithm.

The Byzantine clients are the ones with the most samples of twenty, and attack whenever they get an assignment. Runs use
the bundled digits for 20 rounds (with `--data`, the settings of `benchmarks.bound`) without `rounds.norm_bound`.
Changes are scaled to 0.97 of half of the default bound, 2.5 times the median norm of the honest updates, so the bound
would accept them in every round.

    uphill      Train with gradient ascent on the own samples.
    direction   Move all weights in one random direction, which the Byzantine clients share.
    alie        Send mean - z * std of the honest updates of the level, per weight (Baruch et al., A Little Is Enough,
                NeurIPS 2019, arXiv:1902.06156, with z as in their Algorithm 3).
    labels      Train honestly with the labels 9 - y.
    backdoor    Train with a bright 3 x 3 corner and the label 0 on half of the samples, and send an update with the
                median honest norm. The table shows avg, and the success rate: the fraction of test images of other
                classes that the full model assigns to class 0 if they have the corner.
    adaptive    Like uphill, but with the largest change that the aggregation `judged` accepts. The attacker knows the
                server's samples and the honest updates.

`adaptive` is measured only against `judged` and `judged_trimmed`, in which a trimmed mean merges the other updates.

Usage:
    python -m benchmarks.attacks                           (495 runs of 10 s; finished runs are kept)
    python -m benchmarks.attacks --data fashion_mnist --only none:0,uphill:3    (or cifar10)
    python -m benchmarks.attacks --seeds 0 --json          (print the results as JSON)
    python -m benchmarks.attacks --only uphill:3,backdoor:2 --rules judged_trimmed,fltrust --algorithms flexfl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import bound
from fl_engine.aggregation.judged import Judged
from fl_engine.backends import InProcess
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientResult, ClientUpdate, LocalTask, Params, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.rounds import loop as rounds
from fl_engine.rounds import poisoning
from fl_engine.rounds.acceptance import measure_movement
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import NORM_BOUND
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import Memory
from flexfleet.pipeline.partition import initial_state, site_of

STORE = Path("runs/attacks")
LENGTH = 0.97 * NORM_BOUND / 2
CASES = ("none:0", "uphill:1", "uphill:2", "uphill:3", "direction:3", "alie:3", "labels:3", "backdoor:1", "backdoor:2",
         "adaptive:3")  # fmt: skip
RULES = {
    "mean": "{name: mean}",
    "median": "{name: median}",
    "trimmed": "{name: trimmed_mean, trim: 0.3}",
    "clip": "{name: mean, clip: 0.5}",
    "multi_krum": "{name: multi_krum, byzantine: 0.3}",
    "judged": "{name: judged}",
    "judged_trimmed": "{name: judged, rule: {name: trimmed_mean, trim: 0.3}}",
    "geometric_median": "{name: geometric_median}",
    "fltrust": "{name: fltrust}",
}
DEFAULT_RULES = tuple(RULES)[:6]
DATA = {"digits": bound.DIGITS, "fashion_mnist": bound.FASHION, "cifar10": bound.CIFAR}
ALGORITHMS = {**bound.ALGORITHMS, "fedopt": ("algorithm.name=fedopt",)}


class Uphill:
    """Algorithm whose Byzantine clients train with gradient ascent."""

    def __init__(self, inner: Algorithm, clients: frozenset[int]) -> None:
        self._inner, self._clients = inner, clients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def task(self, assignment: Any, ctx: Any) -> LocalTask:
        task = self._inner.task(assignment, ctx)
        return poisoning.ascending(task) if assignment.client in self._clients else task


@dataclass
class Attacked:
    """Backend that executes assignments, and replaces the updates of Byzantine clients."""

    site: Site
    attack: str
    clients: frozenset[int]
    durable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._honest = InProcess(self.site)
        self._poisoned = InProcess(replace(self.site, data=self._poisoned_data()))
        self._server = ServerSite(self.site)

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        bad = [a for a in plan.assignments if a.client in self.clients]
        good = [a for a in plan.assignments if a.client not in self.clients]
        honest = list(self._honest.run(algorithm, replace(plan, assignments=tuple(good))))
        yield from honest
        if self.attack in ("uphill", "adaptive"):
            algorithm = Uphill(algorithm, self.clients)
        updates = [result for result in honest if isinstance(result, ClientUpdate)]
        usual = statistics.median([self._norm(plan, each) for each in updates] or [1.0])
        for result in self._poisoned.run(algorithm, replace(plan, assignments=tuple(bad))):
            yield self._changed(algorithm, plan, result, updates, usual) if isinstance(result, ClientUpdate) else result

    def _changed(
        self, algorithm: Algorithm, plan: RoundPlan, update: ClientUpdate, honest: Sequence[ClientUpdate], usual: float
    ) -> ClientUpdate:
        if self.attack == "labels":
            return update
        if self.attack == "backdoor":
            return self._scaled(plan, update, usual / self._norm(plan, update))
        if self.attack == "alie":
            return self._alie(update, [each for each in honest if each.spec == update.spec])
        if self.attack == "direction":
            update = replace(update, payload=self._direction(plan, update))
        most = LENGTH * usual / max(self._norm(plan, update), 1e-9)
        if self.attack == "adaptive":
            most = self._accepted(algorithm, plan, update, honest, most)
        return self._scaled(plan, update, most)

    def _accepted(
        self, algorithm: Algorithm, plan: RoundPlan, update: ClientUpdate, honest: Sequence[ClientUpdate], most: float
    ) -> float:
        """Return the largest factor with which `judged` accepts the update, at most `most`."""
        rule, layout = Judged(), self.site.layout
        pairs = [(plan.assignment_of[each.client], each) for each in honest]
        if not pairs:
            return most
        lowest = 0.95 * rule.lowest(rule.scores(pairs, layout, self._server, algorithm))
        low, high = 0.0, most
        for _ in range(8):
            middle = (low + high) / 2
            tried = self._scaled(plan, update, middle)
            pairs = [(plan.assignment_of[update.client], tried)]
            score = rule.scores(pairs, layout, self._server, algorithm)[update.client]
            low, high = (middle, high) if score > lowest else (low, middle)
        return low

    def _sent(self, plan: RoundPlan, update: ClientUpdate) -> Params:
        assignment = plan.assignment_of[update.client]
        return take(assignment.payload, self.site.layout, update.spec, have=assignment.spec)

    def _norm(self, plan: RoundPlan, update: ClientUpdate) -> float:
        return measure_movement(update, plan.assignment_of[update.client], self.site.layout).weights

    def _scaled(self, plan: RoundPlan, update: ClientUpdate, times: float) -> ClientUpdate:
        sent = self._sent(plan, update)
        payload = {
            name: tensor if is_statistic(name) else sent[name] + times * (tensor - sent[name])
            for name, tensor in update.payload.items()
        }
        return replace(update, payload=payload)

    def _direction(self, plan: RoundPlan, update: ClientUpdate) -> Params:
        sent = self._sent(plan, update)
        generator = torch.Generator().manual_seed(seeds.derive(0, "attacks/direction"))
        return {
            n: t if is_statistic(n) else sent[n] + torch.randn(t.shape, generator=generator)
            for n, t in update.payload.items()
        }

    def _alie(self, update: ClientUpdate, level: Sequence[ClientUpdate]) -> ClientUpdate:
        if len(level) < 2:
            return update
        count, bad = len(level) + 1, 1
        needed = count // 2 + 1 - bad
        share = min(max((count - bad - needed) / (count - bad), 0.5), 0.99)
        z = statistics.NormalDist().inv_cdf(share) or 0.3
        payload = {}
        for name, tensor in update.payload.items():
            values = [each.payload[name] for each in level if each.payload[name].shape == tensor.shape]
            stacked = torch.stack(values or [tensor]).double()
            false = stacked.mean(0) - z * stacked.std(0, correction=0)
            payload[name] = tensor if is_statistic(name) else false.to(tensor.dtype)
        return replace(update, payload=payload)

    def _poisoned_data(self) -> Any:
        data = self.site.data
        x, y = data.train_x.clone(), data.train_y.clone()
        for client in self.clients:
            own = torch.as_tensor(self.site.partition.clients[client])
            if self.attack == "labels":
                y[own] = data.task.outputs - 1 - y[own]
            if self.attack == "backdoor":
                x[own[::2]], y[own[::2]] = poisoning.with_corner(x[own[::2]]), poisoning.TARGET
        return replace(data, train_x=x, train_y=y)


def measured(data: str, algorithm: str, case: str, rule: str, seed: int) -> dict[str, float]:
    """Return the last round's accuracies and the success of a back door in %, and counts of dropped updates."""
    prefix = "" if data == "digits" else f"{data}-"
    kept = STORE / f"{prefix}{algorithm}-{case.replace(':', '')}-{rule}-s{seed}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text("utf-8")))
    attack, _, count = case.partition(":")
    settings = (*DATA[data], f"seed={seed}", *ALGORITHMS[algorithm])
    _, out = bound.prepared(f"{prefix}{algorithm}-s{seed}", settings)
    resolved, _ = bound.prepared(f"{prefix}{algorithm}-s{seed}", (*settings, f"algorithm.aggregation={RULES[rule]}"))
    site = site_of(resolved, out / "partition", out / "pool")
    order = sorted(range(len(site.fleet)), key=lambda client: -len(site.partition.clients[client]))
    clients = frozenset(order[: int(count)])
    options = resolved.config.rounds.model_copy(update={"norm_bound": None})
    ledger = Ledger(FolderStore(kept.with_suffix("")))
    run = Run(resolved.algorithm, site, options, resolved.config.run.devices)
    backend = Attacked(site, attack, clients)
    state = rounds.federate(run, initial_state(resolved, site, out / "pool"), backend, ledger, Memory())
    rows = ledger.checkpoints.rows()
    lines = [line for row in rows for line in row.clients]
    dropped = [line["client"] for line in lines if line.get("code") == "dropped"]
    asked = [line["client"] for line in lines]
    result = {
        "avg": 100 * rows[-1].metrics["avg"],
        "full": 100 * rows[-1].metrics["full"],
        "honest": float(sum(client not in clients for client in asked)),
        "honest_dropped": float(sum(client not in clients for client in dropped)),
        "byzantine": float(sum(client in clients for client in asked)),
        "byzantine_dropped": float(sum(client in clients for client in dropped)),
    }
    if attack == "backdoor":
        result["success"] = 100 * poisoning.backdoor_success(site, state)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(result), encoding="utf-8")
    return result


Cell = Mapping[str, float]
"""Means over the seeds of the results of `measured`, the lowest avg and the highest success of any seed."""
Found = Mapping[str, Mapping[str, Mapping[str, Cell]]]
"""Map each attack, algorithm and aggregation to its cell."""


def table(found: Found, rules: Sequence[str]) -> str:
    """Return a Markdown table with avg, and the success of back doors, as means over the seeds."""
    lines = [f"| attack | algorithm | {' | '.join(rules)} |", f"|---|---|{'---|' * len(rules)}"]
    for case, each in found.items():
        for algorithm, cells in each.items():
            texts = [_text(cells[rule]) if rule in cells else "" for rule in rules]
            lines.append(f"| {case.replace(':', ', ')} | {algorithm} | {' | '.join(texts)} |")
    return "\n".join(lines)


def worst_table(found: Found, rules: Sequence[str]) -> str:
    """Return a Markdown table with the lowest avg, and the highest success, over the algorithms and seeds."""
    lines = [f"| attack | {' | '.join(rules)} |", f"|---|{'---|' * len(rules)}"]
    for case, each in found.items():
        texts = []
        for rule in rules:
            cells = [cells[rule] for cells in each.values() if rule in cells]
            worst = {"avg": min((cell["worst_avg"] for cell in cells), default=0.0)}
            if cells and "worst_success" in cells[0]:
                worst["success"] = max(cell["worst_success"] for cell in cells)
            texts.append(_text(worst) if cells else "")
        lines.append(f"| {case.replace(':', ', ')} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _text(cell: Cell) -> str:
    return f"{cell['avg']:.1f}" + (f" ({cell['success']:.0f} %)" if "success" in cell else "")


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--only", default=",".join(CASES), help="attacks with numbers of Byzantine clients")
    parser.add_argument("--rules", default=",".join(DEFAULT_RULES), help="names in RULES")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bound.STORE = STORE / "prepared"
    rules, all_seeds = args.rules.split(","), [int(seed) for seed in args.seeds.split(",")]
    found: dict[str, dict[str, dict[str, Cell]]] = {}
    for case in args.only.split(","):
        for algorithm in args.algorithms.split(","):
            for rule in rules:
                if case.startswith("adaptive") and not rule.startswith("judged"):
                    continue
                runs = [measured(args.data, algorithm, case, rule, seed) for seed in all_seeds]
                means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
                means["worst_avg"] = min(run["avg"] for run in runs)
                if "success" in means:
                    means["worst_success"] = max(run["success"] for run in runs)
                found.setdefault(case, {}).setdefault(algorithm, {})[rule] = means
                if not args.json:
                    print(f"{case} {algorithm} {rule}: {means}", flush=True)
    print(
        json.dumps({"seeds": all_seeds, "attacks": found})
        if args.json
        else f"{table(found, rules)}\n\n{worst_table(found, rules)}"
    )


if __name__ == "__main__":
    main()

"""The evidence campaign: FlexFL against its control and its four ablations, on real data, in about an hour.

    make evidence        (again, after an interruption: finished runs are kept, the others go on where they stopped)

Every cell is one `flexfleet run`; as many run side by side as there are cores, each on one thread. Writes
docs/evidence/results.json, tables.md and a drawing per data set.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORE = Path("runs/evidence")
OUT = Path("docs/evidence")

COMMON = (
    "dataset.train_samples=10000",
    "partition.clients=20",
    "partition.rule=dirichlet",
    "partition.alpha=0.6",
    "partition.proxy=0.02",
    "model.name=small_cnn",
    "training.fraction=0.2",
    "training.epochs=1",
    "training.batch_size=20",
    "training.lr=0.05",
    "training.lr_decay=0.99",
    f"run.store={STORE}",
)
DATASETS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "cifar10": ((0, 1, 2), ("rounds.stop=100", "rounds.evaluate_every=5")),
    "fashion_mnist": ((0,), ("rounds.stop=60", "rounds.evaluate_every=10")),
}
"""Seeds of the main comparison (ablations run with the first), and the settings of the data set's cells."""
FLEXFL = ("algorithm.name=flexfl", "algorithm.epsilon=3.0")
MAIN = {
    "flexfl": FLEXFL,
    "all_large": ("algorithm.name=all_large", "algorithm.eligible=capable"),
}
ABLATION = (*FLEXFL, "rounds.stop=40", "rounds.evaluate_every=10")
"""Shorter, to stay within the hour: compared with the round of the same number of the main run."""
ABLATIONS = {
    "flexfl without self-KD": (*ABLATION, "algorithm.kd_weight=0.0"),
    "flexfl without adaptive models": (*ABLATION, "algorithm.adaptive_size=null"),
    "flexfl without APoZ": (*ABLATION, "algorithm.use_apoz=false"),
    "flexfl without adjustment": (*ABLATION, "algorithm.use_adjustment=false"),
}


@dataclass(frozen=True)
class Cell:
    dataset: str
    label: str
    seed: int
    settings: tuple[str, ...]

    @property
    def run_id(self) -> str:
        return f"{self.dataset}-{self.label.replace(' ', '-')}-s{self.seed}"

    @property
    def command(self) -> list[str]:
        settings = (
            *COMMON,
            *DATASETS[self.dataset][1],
            f"dataset.name={self.dataset}",
            f"seed={self.seed}",
            *self.settings,
        )
        options = [word for setting in settings for word in ("--set", setting)]
        return ["flexfleet", "run", "--run-id", self.run_id, "--resume", "--json", *options]


def cells() -> list[Cell]:
    main = [Cell(d, a, s, MAIN[a]) for d, (seeds, _) in DATASETS.items() for s in seeds for a in MAIN]
    return main + [Cell(d, a, seeds[0], ABLATIONS[a]) for d, (seeds, _) in DATASETS.items() for a in ABLATIONS]


def run(cell: Cell) -> dict[str, Any]:
    """result.json of the cell, from an earlier campaign or from running it now."""
    found = STORE / cell.run_id / "result.json"
    if not found.is_file():
        started = time.monotonic()
        STORE.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, "-m", "components.cli", *cell.command[1:]]
        with open(STORE / f"{cell.run_id}.log", "a") as log:
            code = subprocess.run(program, stdout=subprocess.DEVNULL, stderr=log, check=False).returncode
        if code != 0:
            raise SystemExit(f"{cell.run_id} ended with {code}: see {STORE / cell.run_id}.log; run again to go on")
        print(f"{cell.run_id}: {time.monotonic() - started:.0f} s", flush=True)
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def summarise(results: dict[Cell, dict[str, Any]]) -> str:
    """Markdown: per data set the main comparison (mean and spread over seeds, last round), then the ablations."""
    lines = []
    for dataset in DATASETS:
        lines += [
            f"### {dataset}",
            "",
            "| last round | seeds | avg % | full % | best avg / full % | MB down + up | waste % | minutes |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for label in MAIN:
            rows = [r for c, r in results.items() if (c.dataset, c.label) == (dataset, label)]
            single = len(rows[0]["metrics"]["levels"]) == 1
            avg = "-" if single else _spread([100 * r["metrics"]["avg"] for r in rows])
            full = _spread([100 * r["metrics"]["full"] for r in rows])
            best = [[100 * r["metrics"]["best"][k] for r in rows] for k in ("avg", "full")]
            best_text = f"- / {_spread(best[1])}" if single else f"{_spread(best[0])} / {_spread(best[1])}"
            megabytes = _spread([(r["bytes"]["down"] + r["bytes"]["up"]) / 1e6 for r in rows], 0)
            waste = _spread([100 * r["waste"] for r in rows], 1)
            minutes = _spread([r["seconds"] / 60 for r in rows], 1)
            lines.append(
                f"| {label} | {len(rows)} | {avg} | {full} | {best_text} | {megabytes} | {waste} | {minutes} |"
            )
        seed = DATASETS[dataset][0][0]
        curves = {c.label: {step: point for step, *point in _curve(c)} for c in results if _is(c, dataset, seed)}
        steps = sorted(set.intersection(*(set(curves[label]) for label in ("flexfl", *ABLATIONS))))
        lines += ["", f"| seed {seed}, avg / full % | " + " | ".join(f"round {step}" for step in steps) + " |"]
        lines.append("|---" * (len(steps) + 1) + "|")
        for label in ("flexfl", *ABLATIONS):
            points = [curves[label][step] for step in steps]
            lines.append(f"| {label} | " + " | ".join(f"{100 * a:.2f} / {100 * f:.2f}" for a, f in points) + " |")
        lines.append("")
    return "\n".join(lines)


def _is(cell: Cell, dataset: str, seed: int) -> bool:
    return (cell.dataset, cell.seed) == (dataset, seed)


def _spread(values: Sequence[float], digits: int = 2) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def draw(results: dict[Cell, dict[str, Any]], dataset: str, path: Path) -> None:
    """Accuracy of the full model and mean over the levels, by round: main comparison left, ablations right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, labels in ((left, MAIN), (right, ("flexfl", *ABLATIONS))):
        for i, label in enumerate(labels):
            curves = [_curve(c) for c in results if (c.dataset, c.label) == (dataset, label)]
            if axis is right:
                last = max(step for c in results if c.label in ABLATIONS for step, _, _ in _curve(c))
                curves = [[point for point in curves[0] if point[0] <= last]]
            steps = [step for step, _, _ in curves[0]]
            for key, style in ((1, "-"), (2, "--")):
                if key == 1 and label == "all_large":
                    continue
                columns = list(zip(*[[100 * point[key] for point in curve] for curve in curves], strict=True))
                mean = [statistics.fmean(column) for column in columns]
                name = f"{label} ({'avg' if key == 1 else 'full'})" if axis is left else (label if key == 1 else None)
                axis.plot(steps, mean, style, color=f"C{i}", linewidth=1.6 if key == 1 else 1.1, label=name)
                if len(curves) > 1:
                    low, high = [min(c) for c in columns], [max(c) for c in columns]
                    axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.12, linewidth=0)
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    left.set_ylabel("test accuracy, %")
    left.set_title(f"{dataset}: FlexFL and its control (band: range over seeds)", fontsize=10)
    right.set_title("ablations, seed 0 (solid avg, dashed full)", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _curve(cell: Cell) -> list[tuple[int, float, float]]:
    rounds = json.loads((STORE / cell.run_id / "history.json").read_text())["rounds"]
    return [(r["round"] + 1, r["metrics"]["avg"], r["metrics"]["full"]) for r in rounds if "avg" in r["metrics"]]


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan = cells()
    print(f"{len(plan)} runs, {os.cpu_count()} side by side", flush=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = dict(zip(plan, pool.map(run, plan), strict=True))
    OUT.mkdir(parents=True, exist_ok=True)
    for dataset in DATASETS:
        draw(results, dataset, OUT / f"{dataset}.svg")
    report = {c.run_id: {"command": " ".join(c.command), "result": r} for c, r in results.items()}
    for entry in report.values():
        for local in ("store_uri", "report", "mlflow_run_id"):
            entry["result"].pop(local)
    (OUT / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = summarise(results)
    (OUT / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

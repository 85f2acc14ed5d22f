"""Measure how much accuracy FlexFL loses on Fashion-MNIST because of Byzantine clients or private aggregation.

In the first part, a fixed fraction of the clients reverses the sign of its updates (flip) or multiplies its updates by
100 (scale). The second part measures private aggregation with many more clients and with four noise multipliers. The
script takes a quarter of an hour on one core. The results are written to results.json and a chart in docs/robustness/.

Usage:
    python -m benchmarks.robustness        (resumes after an interruption; finished runs are kept)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore

STORE = Path("runs/robustness")
OUT = Path("docs/robustness")
ROUNDS = 20
ATTACKS = {"flip": "change turned around", "scale": "change x 100"}
SHARES = (0, 10, 20)
"""Percentages of Byzantine clients."""

COMMON = (
    "dataset.name=fashion_mnist",
    "dataset.test_samples=2000",
    "model.name=small_cnn",
    "training.epochs=1",
    "rounds.evaluate_every=5",
    f"rounds.stop={ROUNDS}",
    "rounds.norm_bound=null",
    "tracking.mlflow=null",
)
ATTACKED = (
    *COMMON,
    "dataset.train_samples=4000",
    "partition.proxy=0.05",
    "partition.rule=dirichlet",
    "partition.alpha=0.3",
    "partition.clients=40",
    "model.width=0.5",
    "training.fraction=0.5",
    "training.batch_size=20",
    "training.lr=0.05",
    "algorithm.epsilon=5.0",
)
AGGREGATIONS = {
    "mean": "{name: mean}",
    "clipped": "{name: mean, clip: 0.5}",
    "trimmed": "{name: trimmed_mean, trim: 0.3}",
    "median": "{name: median}",
    "median_clipped": "{name: median, clip: 0.5}",
}
"""Map labels to aggregations. The updates of honest clients have norms from 0.2 to 1."""
MANY = (
    *COMMON,
    "dataset.train_samples=21000",
    "partition.proxy=0.02",
    "partition.rule=iid",
    "partition.clients=1000",
    "model.width=0.25",
    "training.fraction=0.2",
    "training.batch_size=10",
    "training.lr=0.1",
    "training.drop_last=false",
    "algorithm.epsilon=8.0",
)
NOISE = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Case:
    id: str
    settings: Sequence[str]
    aggregations: Mapping[str, str]

    @property
    def command(self) -> list[str]:
        labels = ",".join(f"{label}=flexfl" for label in self.aggregations)
        own = [f"{label}:algorithm.aggregation={value}" for label, value in self.aggregations.items()]
        options = [word for setting in (*self.settings, *own) for word in ("--set", setting)]
        return ["flexfleet", "compare", "--algorithms", labels, "--seeds", "0", "--id", self.id, *options]


def accuracies(case: Case) -> dict[str, dict[str, float]]:
    """Execute the missing runs. Map each label to its accuracies in the last round, in %: the mean over the levels
    (`avg`) and the accuracy of the largest level (`full`)."""
    local = ["--resume", "--jobs", "1", "--set", f"run.store={STORE}"]
    code = subprocess.run(
        [sys.executable, "-m", "flexfleet.cli.main", *case.command[1:], *local], check=False
    ).returncode
    if code != 0:
        raise SystemExit(f"{case.id} failed with exit status {code}. Fix the cause and restart; finished runs are kept")
    found = json.loads((STORE / case.id / "comparison.json").read_text("utf-8"))["results"]
    return {
        label: {figure: 100 * found[label]["last"][figure]["mean"] for figure in ("avg", "full")}
        for label in case.aggregations
    }


def attacked(attack: str, share: int) -> Case:
    """Return a comparison in which the same `share` % of the clients attack in every round."""
    if share == 0:
        return Case("honest", ATTACKED, AGGREGATIONS)
    times = "x100" if attack == "scale" else ""
    settings = (*ATTACKED, f"rounds.faults={attack}={share / 100:g}{times},always")
    return Case(f"{attack}-{share}", settings, AGGREGATIONS)


def private() -> Case:
    noisy = {f"z{z:g}": f"{{name: private, clip: 0.5, noise_multiplier: {z}, delta: 1e-4}}" for z in NOISE}
    return Case("private", MANY, {"mean": "{name: mean}", "clipped": "{name: mean, clip: 0.5}", **noisy})


def epsilon(case: Case, label: str) -> float | None:
    """Return the last logged epsilon of the run; None if the run was not private."""
    rows = Checkpoints(FolderStore(STORE / case.id / f"{label}-s0")).rows()
    return rows[-1].metrics.get("epsilon")


def draw(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "robustness"})
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), sharey=True, constrained_layout=True)
    for axis, attack in zip(axes, ATTACKS, strict=True):
        for label, mark in zip(AGGREGATIONS, "os^Dv", strict=True):
            axis.plot(SHARES, [found[attack][str(s)][label]["avg"] for s in SHARES], f"-{mark}", label=label)
        axis.set(xlabel="bad clients, %", title=ATTACKS[attack], xticks=SHARES)
    axes[0].set(ylabel="avg accuracy, %", ylim=(0, 100))
    axes[1].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    OUT.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        attack: {str(share): accuracies(attacked(attack, share)) for share in SHARES} for attack in ATTACKS
    }
    case = private()
    found["private"] = {
        label: {**figures, "epsilon": epsilon(case, label)} for label, figures in accuracies(case).items()
    }
    (OUT / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, OUT / "robustness.svg")
    print("| bad clients | " + " | ".join(AGGREGATIONS) + " |\n" + "|---" * (1 + len(AGGREGATIONS)) + "|")
    for attack in ATTACKS:
        for share in SHARES:
            row = found[attack][str(share)]
            print(f"| {attack}, {share} % | " + " | ".join(f"{row[label]['avg']:.1f}" for label in AGGREGATIONS) + " |")
    for label, row in found["private"].items():
        privacy = "not private" if row["epsilon"] is None else f"epsilon {row['epsilon']:.1f}"
        print(f"{label}: avg {row['avg']:.1f} %, full {row['full']:.1f} %, {privacy}")


if __name__ == "__main__":
    main()

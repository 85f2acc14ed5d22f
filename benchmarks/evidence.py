"""Compares the algorithms on real data, in about an hour and a half on two cores.

    make evidence        (resumes after an interruption: finished runs are kept, the others go on where they stopped)

Makes four comparisons (`flexfleet compare`): CIFAR-10 and Fashion-MNIST, each with Dirichlet 0.3 and IID. Writes
docs/evidence/: tables.md, results.json (each comparison's command and numbers) and a drawing of each comparison.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORE = Path("runs/evidence")
OUT = Path("docs/evidence")

COMMON = (
    "dataset.train_samples=10000",
    "partition.clients=20",
    "partition.proxy=0.02",
    "model.name=small_cnn",
    "training.fraction=0.2",
    "training.epochs=1",
    "training.batch_size=20",
    "training.lr=0.05",
    "training.lr_decay=0.99",
    "rounds.evaluate_every=10",
    "tracking.mlflow=null",
)
TABLE = "algorithm.selection={name: resource_table}"
WIDTHS = "algorithm.widths=[0.71,0.71,1.0]"
MAIN: dict[str, tuple[str, ...]] = {
    "flexfl": ("algorithm.epsilon=3.0",),
    "adaptivefl": (),
    # As FlexFL's paper compares: with its selection, without HeteroFL's additions and ScaleFL's distillation.
    "heterofl": (TABLE, "algorithm.scaler=false", "algorithm.mask_labels=false", "algorithm.static_bn=false"),
    "scalefl": (TABLE, WIDTHS, "algorithm.kd_weight=0.0"),
    "decoupled": (),
    "fedrolex": (TABLE, "algorithm.static_bn=false"),
    "all_large": ("algorithm.eligible=all",),
    "capable=all_large": ("algorithm.eligible=capable",),
}
"""Algorithms (label, or label=algorithm) and their settings."""
AS_PUBLISHED: dict[str, tuple[str, ...]] = {
    "heterofl_published=heterofl": (),
    "scalefl_kd=scalefl": (WIDTHS, "algorithm.kd_weight=0.05"),
}
ABLATIONS: dict[str, tuple[str, ...]] = {
    "no_kd=flexfl": ("algorithm.epsilon=3.0", "algorithm.kd_weight=0.0"),
    "no_adaptive=flexfl": ("algorithm.epsilon=3.0", "algorithm.adaptive_size=null"),
    "no_apoz=flexfl": ("algorithm.epsilon=3.0", "algorithm.use_apoz=false"),
    "no_adjustment=flexfl": ("algorithm.epsilon=3.0", "algorithm.use_adjustment=false"),
}


@dataclass(frozen=True)
class Campaign:
    dataset: str
    partition: tuple[str, ...]
    seeds: str
    rounds: int
    algorithms: Mapping[str, Sequence[str]]

    @property
    def id(self) -> str:
        return f"{self.dataset}-{'iid' if 'partition.rule=iid' in self.partition else 'dirichlet'}"

    @property
    def command(self) -> list[str]:
        own = [f"{a.partition('=')[0]}:{s}" for a, settings in self.algorithms.items() for s in settings]
        settings = (f"dataset.name={self.dataset}", *self.partition, *COMMON, f"rounds.stop={self.rounds}", *own)
        options = [word for setting in settings for word in ("--set", setting)]
        labels = ",".join(self.algorithms)
        return ["flexfleet", "compare", "--algorithms", labels, "--seeds", self.seeds, "--id", self.id, *options]


DIRICHLET = ("partition.rule=dirichlet", "partition.alpha=0.3")
IID = ("partition.rule=iid",)
CAMPAIGNS = (
    Campaign("cifar10", DIRICHLET, "0,1,2", 60, MAIN),
    Campaign("fashion_mnist", DIRICHLET, "0", 40, {**MAIN, **ABLATIONS}),
    Campaign("cifar10", IID, "0", 40, {**MAIN, **AS_PUBLISHED}),
    Campaign("fashion_mnist", IID, "0", 40, MAIN),
)


def run(campaign: Campaign) -> dict[str, Any]:
    """Makes the runs of a campaign that are missing; returns its comparison.json."""
    jobs = str(os.cpu_count() or 1)
    local = ["--resume", "--jobs", jobs, "--set", f"run.store={STORE}"]
    program = [sys.executable, "-m", "flexfleet.cli", *campaign.command[1:], *local]
    code = subprocess.run(program, check=False).returncode
    if code != 0:
        raise SystemExit(f"{campaign.id} ended with {code}: fix the cause and start again; finished runs are kept")
    found: dict[str, Any] = json.loads((STORE / campaign.id / "comparison.json").read_text())
    return found


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    tables = []
    for campaign in CAMPAIGNS:
        found = run(campaign)
        folder = STORE / campaign.id
        results[campaign.id] = {"command": shlex.join(campaign.command), "comparison": found}
        text = (folder / "comparison.md").read_text().strip()
        tables.append(text.replace("(comparison.svg)", f"({campaign.id}.svg)") + "\n")
        shutil.copyfile(folder / "comparison.svg", OUT / f"{campaign.id}.svg")
        (OUT / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (OUT / "tables.md").write_text("\n".join(tables))
    print("\n".join(tables))


if __name__ == "__main__":
    main()

"""The algorithm of docs/guides/extending.md in a folder of its own, as a reader would write it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import pytest

from fl_engine.algorithms import FedNova
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import TRAINING, assert_same_bits, context_of, start_of, tiny_site, update_of

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest
from mymodule import FedNova
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.tiny import TRAINING

class TestFedNova(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self):
        return FedNova(training=TRAINING)

    def promises_to_fit(self, algorithm):
        return False  # like FedAvg
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    guide = (ROOT / "docs/guides/extending.md").read_text()
    (code,) = re.findall(r"```python\n# mymodule\.py\n(.*?)```", guide, re.DOTALL)
    assert len(code.splitlines()) <= 30
    (tmp_path / "mymodule.py").write_text(code)
    return tmp_path


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_recipe_passes_the_conformance_suite(folder: Path) -> None:
    (folder / "test_mine.py").write_text(SUITE)
    done = run(folder, "-m", "pytest", "-v", "--strict-markers", "-k", "not other_samples")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count("PASSED") >= 15


def test_recipe_runs_and_learns(folder: Path) -> None:
    settings = ["algorithm.name=mymodule:FedNova", "rounds.stop=6", "rounds.evaluate_every=6", "tracking.mlflow=null"]
    options = [word for setting in settings for word in ("--set", setting)]
    done = run(folder, "-m", "flexfleet", "run", "--run-id", "m", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["full"] > 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_recipe_merges_like_the_built_in_fednova(folder: Path, momentum: float) -> None:
    merged = []
    for kind in (FedNova, run_path(str(folder / "mymodule.py"))["FedNova"]):
        algorithm = kind(training=replace(TRAINING, momentum=momentum))
        site = tiny_site(algorithm)
        state = start_of(algorithm, site)
        plan = algorithm.plan(state, context_of(site, 0))
        updates = []
        for steps, each in enumerate(plan.assignments, start=1):
            update = update_of(
                each, each.spec, {name: t + steps**2 for name, t in each.payload.items()}, examples=steps
            )
            updates.append(replace(update, metrics={"loss": 1.0, "steps": float(steps)}))
        merged.append(algorithm.merge(state, plan, updates, ServerSite(site)).params)
    assert_same_bits(*merged)

"""The recipe for an algorithm of one's own in docs/guides/extending.md, followed word by word from scratch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = "from fl_engine.algorithms.fednova import FedNova\n"
LINE = '    "fednova": FedNova,\n'


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the recipe's file and its line added."""
    root = tmp_path_factory.mktemp("recipe")
    for folder in ("fl_engine", "flexfleet", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if (known := ROOT / ".mypy_cache").exists():  # what `make lint` has found out about the other files
        shutil.copytree(known, root / known.name)
    shutil.copyfile(ROOT / "pyproject.toml", root / "pyproject.toml")
    readme = (ROOT / "docs/guides/extending.md").read_text()
    (file,) = re.findall(r"```python\n# fl_engine/algorithms/fednova\.py\n(.*?)```", readme, re.DOTALL)
    (root / "fl_engine/algorithms/fednova.py").write_text(file)
    registry = root / "fl_engine/algorithms/__init__.py"
    assert LINE.strip() in readme
    text, last = registry.read_text(), '    "scalefl": ScaleFL,\n'
    assert last in text
    registry.write_text(IMPORT + text.replace(last, last + LINE, 1))
    return root


def run(checkout: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *argv], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def test_it_passes_the_laws_that_all_algorithms_share(checkout: Path) -> None:
    suite = "tests/conformance/test_algorithms.py"
    done = run(checkout, "-m", "pytest", "-v", "-v", "-p", "no:cacheprovider", suite, "-k", "[fednova")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count("PASSED") >= 15, "the registry's line put it into the suite"


def test_it_runs_and_learns(checkout: Path) -> None:
    settings = ["algorithm.name=fednova", "rounds.stop=6", "rounds.evaluate_every=6", "tracking.mlflow=null"]
    options = [word for setting in settings for word in ("--set", setting)]
    done = run(checkout, "-m", "flexfleet.cli.main", "run", "--run-id", "m", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["full"] > 0.5


@pytest.mark.parametrize(
    ("momentum", "expected"),
    [
        # Samples 1, 1, 2; steps 1, 2, 3; moved 2, 5, 17. Without momentum |a| is 1, 2, 3 and tau 1/4 + 2/4 + 6/4 = 9/4,
        # and the mean of 2, 5/2, 17/3 is 1/2 + 5/8 + 17/6 = 95/24: 9/4 * 95/24 = 285/32.
        (0.0, 285 / 32),
        # With 1/2 |a| is 1, 1 + 3/2, 1 + 3/2 + 7/4 = 1, 5/2, 17/4 and tau 1/4 + 5/8 + 17/8 = 3, and the mean of 2, 2, 4
        # is 3: 9.
        (0.5, 9.0),
    ],
)
def test_a_change_is_divided_by_how_far_its_steps_carry(checkout: Path, momentum: float, expected: float) -> None:
    code = f"""
from dataclasses import replace
from fl_engine.algorithms.fednova import FedNova
from fl_engine.core.types import ClientUpdate
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import TRAINING, context_of, start_of, tiny_site
import torch
algorithm = FedNova(training=replace(TRAINING, momentum={momentum}))
site = tiny_site(algorithm)
state = start_of(algorithm, site)
plan = algorithm.plan(state, context_of(site, 0))
came = [
    ClientUpdate(
        0, o.client, o.spec, {{n: t + moved for n, t in o.payload.items()}}, samples, {{"loss": 1.0, "steps": steps}}
    )
    for o, moved, steps, samples in zip(plan.orders, (2.0, 5.0, 17.0), (1.0, 2.0, 3.0), (1, 1, 2))
]
assert len(came) == 3
merged = algorithm.merge(state, plan, came, ServerSite(site))
for name, old in state.params.items():
    torch.testing.assert_close(merged.params[name], old + {expected})
"""
    done = run(checkout, "-c", code)
    assert done.returncode == 0, done.stderr


def test_its_types_are_right(checkout: Path) -> None:
    done = run(checkout, "-m", "mypy", "fl_engine/algorithms/fednova.py")
    assert done.returncode == 0, done.stdout

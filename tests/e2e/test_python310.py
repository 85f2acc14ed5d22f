"""The client's part on Python 3.10, which JetPack 6 has: by its types, and by an agent that really runs there.

The second needs Python 3.10 with torch, numpy, pydantic, safetensors, boto3 and scikit-learn, as `make test-python310`
installs them. FLEXFLEET_PYTHON310 names its interpreter; else `python3.10` is looked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexfleet.cli.main import ON_DEVICES
from tests.harness.imports import ROOT, reach

PARTS = ("flexfleet.worker.server", "flexfleet.pipeline.profile")
LACKS = re.compile(r"\[(attr-defined|call-arg|call-overload|import-not-found|name-defined|syntax|valid-type)\]$")
"""What mypy says of what is not there. (Types of newer packages are not those of Python 3.10.)"""
NEEDS = "torch, numpy, pydantic, safetensors, boto3, sklearn, yaml"


def test_the_client_s_part_uses_nothing_that_python_3_10_lacks(tmp_path: Path) -> None:
    """Functions, methods and arguments, in all modules that the client's part imports. (mypy also reads those that are
    imported under `if TYPE_CHECKING`; they are not on the device's way.)"""
    files = reach(PARTS)
    assert "flexfleet/api/comparing.py" not in files and "fl_engine/training/local.py" in files
    probe = tmp_path / "probe.py"
    probe.write_text("def f(e: Exception) -> None:\n    e.add_note('3.11')\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-version", "3.10", "--no-error-summary", str(probe), *sorted(files)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if LACKS.search(line)]
    assert any("add_note" in line for line in found), f"it sees nothing: {done.stdout}{done.stderr}"
    assert [line for line in found if line.partition(":")[0] in files] == []


@pytest.fixture(scope="module")
def python310() -> str:
    """An interpreter with the packages."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = os.environ.get("FLEXFLEET_PYTHON310")
    known = [named] if named else [shutil.which("python3.10"), *map(str, pyenv.glob("versions/3.10*/bin/python"))]
    lacks = "there is none"
    for each in filter(None, known):
        given = [each, "-c", f"import sys; assert sys.version_info[:2] == (3, 10); import {NEEDS}"]
        done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == 0:
            return each
        lacks = f"{each}: {(done.stderr.splitlines() or ['nothing'])[-1]}"
    assert not named, lacks
    pytest.skip(f"no Python 3.10 with {NEEDS} ({lacks}): `make test-python310` makes one")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def there(python310: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line with Python 3.10."""
    given = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 600}
    return lambda *argv: subprocess.run([python310, "-m", "flexfleet", *argv], check=False, **given)  # type: ignore[call-overload]


def test_an_agent_of_python_3_10_gives_the_bits_of_the_server_s(
    python310: str, fork_server: Any, quick: Sequence[str], tmp_path: Path
) -> None:
    def flexfleet(*argv: str, sets: Sequence[str] = ()) -> Any:
        return fork_server.start("flexfleet", *argv, cwd=tmp_path, sets=[*quick, "rounds.stop=2", *sets])

    done = flexfleet("invite").wait(120).ok()
    with (tmp_path / "log").open("w+") as told:
        given = ["-m", "flexfleet", "agent", "--invite", "invitations/device-1.json", "--folder", "device"]
        agent = subprocess.Popen([python310, *given], cwd=tmp_path, env=environment(), stderr=told)
        try:
            done = flexfleet("run", "--json", "--run-id", "a", sets=["run.backend=agents"]).wait(300)
        finally:
            agent.terminate()
            assert agent.wait(60) == 143, "it says good-bye"
        assert done.code == 0, done.err + (tmp_path / "log").read_text()
    here = flexfleet("run", "--json", "--run-id", "b").wait(120)
    assert done.json["model_sha256"] == here.json["model_sha256"]


MISTAKES = (
    "rounds.stop=x",
    "training.lr=[1]",
    "algorithm.kd_weights=1",
    "fleet.tiers=[3]",
    "kubernetes.pools={weak: 3}",
)


def test_every_command_for_devices_runs_on_python_3_10(there: Callable[..., Any]) -> None:
    """All commands but `agent` and `profile`, which have tests of their own."""
    given = {"completion": ["bash"], "init": ["new"], "list": ["algorithms"]}
    for command in sorted(set(ON_DEVICES) - {"agent", "profile"}):
        done = there(command, *given.get(command, ()))
        assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"
    for text in MISTAKES:
        done = there("check", "--set", text)
        assert done.returncode == 2 and "Traceback" not in done.stderr, f"{text}: {done.stderr}"


def test_a_profile_is_taken_on_python_3_10(there: Callable[..., Any], quick: Sequence[str]) -> None:
    sets = [part for pair in (*quick, "algorithm.name=all_large") for part in ("--set", pair)]
    done = there("profile", "--seconds", "0.2", "--out", "tier.yaml", *sets)
    assert done.returncode == 0, done.stderr
    done = there("check", "--config", "tier.yaml", *sets)
    assert done.returncode == 0 and done.stdout.startswith("ok: "), done.stderr
    done = there("run", *sets)
    assert done.returncode == 6 and "needs Python 3.11 or newer" in done.stderr

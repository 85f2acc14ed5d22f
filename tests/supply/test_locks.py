"""The images install what the locks have: every file by its hash, in the versions of constraints.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / "components/locks").glob("*.txt"))}
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==([^\s;]+)\s*(?:;[^\\]*)?\\?")
TORCH = {'platform_machine == "aarch64"': "aarch64", 'platform_machine != "aarch64"': "x86_64"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        match = REQUIREMENT.fullmatch(line)
        assert match, line
        found.setdefault(canonical(match[1]), set()).add(match[2])
    return found


def locked(name: str) -> dict[tuple[str, str], int]:
    """Map each (name, version) in a lock to its number of hashes. A lock has no other lines."""
    found: dict[tuple[str, str], int] = {}
    for line in LOCKS[name].splitlines():
        if match := REQUIREMENT.fullmatch(line):
            last = canonical(match[1]), match[2]
            found.setdefault(last, 0)
        elif re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line):
            found[last] += 1
        else:
            assert line.startswith("#"), line
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_the_constrained_versions_with_hashes(name: str) -> None:
    wanted = constraints()
    packages = locked(name)
    assert packages
    for (package, version), hashes in packages.items():
        assert hashes, f"{package} has no hash: `make lock`"
        assert version.removesuffix("+cpu") in wanted[package], f"{package}: `make lock`"


def test_constraints_name_each_package_once() -> None:
    """A package is named twice if Python 3.10, which devices have, needs another version."""
    twice = {name: versions for name, versions in constraints().items() if len(versions) > 1}
    lines = (ROOT / "constraints.txt").read_text()
    marked = re.findall(r'^(\S+)==\S+; python_version (<|>=) "3\.11"$', lines, re.MULTILINE)
    older = {name for name, sign in marked if sign == "<"}
    assert older == {name for name, sign in marked if sign == ">="} and "numpy" in older
    assert set(twice) == {"torch"} | older
    torch = re.findall(r"^torch==(\S+); (.+)$", lines, re.MULTILINE)
    found = re.findall(r"^torch==(\S+) ; platform_machine == '(\w+)' \\$", LOCKS["torch"], re.MULTILINE)
    assert {TORCH[where]: version for version, where in torch} == {
        machine: version.removesuffix("+cpu") for version, machine in found
    }


@pytest.mark.parametrize("lock", ["build", "flexfleet", "alone", "mlflow", "sbom"])
def test_lock_holds_its_requirements(lock: str) -> None:
    file = {"flexfleet": "requirements.txt"}.get(lock, f"requirements-{lock}.txt")
    lines = (ROOT / "components" / file).read_text().splitlines()
    names = {canonical(line.partition("[")[0]) for line in lines if not line.startswith("#")}
    held = {name for name, _ in locked(lock)} | ({"torch"} if lock == "flexfleet" else set())
    assert names <= held, f"{names - held}: `make lock`"


def test_dockerfile_installs_nothing_but_the_locks() -> None:
    dockerfile = (ROOT / "components/Dockerfile").read_text()
    assert re.search(r"^ENV .*(?:\\\n.*)*PIP_REQUIRE_HASHES=1 PIP_NO_DEPS=1$", dockerfile, re.MULTILINE)
    calls = re.findall(r"(?:\S+=\S+ )*\S*pip install [^&\n\\;]*", dockerfile)
    files = {file for call in calls for file in re.findall(r"--requirement (\w+)\.txt", call)}
    assert files == set(LOCKS)
    (own,) = [call for call in calls if "--requirement" not in call]
    assert own == "PIP_REQUIRE_HASHES=0 PIP_NO_INDEX=1 pip install --no-build-isolation ."
    assert "REQUIRE_HASHES=0" not in dockerfile.replace(own, "")


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    (tmp_path / "zipp-4.1.2-py3-none-any.whl").write_bytes(b"something else")
    lock = tmp_path / "lock.txt"
    lock.write_text(re.search(r"^zipp==(?:.*\\\n)+.*\n", LOCKS["flexfleet"], re.MULTILINE)[0])  # type: ignore[index]
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--require-hashes", "--no-index"]
    where = ["--find-links", str(tmp_path), "--dest", str(tmp_path / "to"), "--requirement", str(lock)]
    done = subprocess.run([*pip, *where], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stdout + done.stderr

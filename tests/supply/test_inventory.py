"""What the images install: every file by its hash, in constraints.txt's versions, under licences that are noted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from components import inventory
from fl_engine.core import system
from fl_engine.core.errors import BadInput, IntegrityError

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / "components/locks").glob("*.txt"))}
TORCH = {'platform_machine == "aarch64"': "aarch64", 'platform_machine != "aarch64"': "x86_64"}


def constraints() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        match = inventory.REQUIREMENT.match(line)
        assert match, line
        found.setdefault(inventory.canonical(match[1]), set()).add(match[2])
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_the_constrained_versions_with_hashes(name: str) -> None:
    wanted = constraints()
    packages = inventory.locked(LOCKS[name])
    assert packages
    for (package, version), sums in packages.items():
        assert sums, f"{package} has no hash: `make lock`"
        assert version.removesuffix("+cpu") in wanted[package], f"{package}: `make lock`"


def test_constraints_name_each_package_once() -> None:
    """And once more what has another version for Python 3.10, which devices have."""
    twice = {name: versions for name, versions in constraints().items() if len(versions) > 1}
    lines = (ROOT / "constraints.txt").read_text()
    marked = re.findall(r'^(\S+)==\S+; python_version (<|>=) "3\.11"$', lines, re.MULTILINE)
    older = {name for name, sign in marked if sign == "<"}
    assert older == {name for name, sign in marked if sign == ">="} and "numpy" in older
    assert set(twice) == {"torch"} | older
    torch = re.findall(r"^torch==(\S+); (.+)$", lines, re.MULTILINE)
    locked = re.findall(r"^torch==(\S+) ; platform_machine == '(\w+)' \\$", LOCKS["torch"], re.MULTILINE)
    assert {TORCH[where]: version for version, where in torch} == {
        machine: version.removesuffix("+cpu") for version, machine in locked
    }


def test_constraints_pin_the_arm64_torch_of_messages() -> None:
    (pinned,) = re.findall(
        r'^torch==(\S+); platform_machine == "aarch64"$', (ROOT / "constraints.txt").read_text(), re.M
    )
    assert pinned == system.FITTING


@pytest.mark.parametrize("lock", ["build", "flexfleet", "alone", "mlflow", "sbom"])
def test_lock_holds_its_requirements(lock: str) -> None:
    file = {"flexfleet": "requirements.txt"}.get(lock, f"requirements-{lock}.txt")
    lines = (ROOT / "components" / file).read_text().splitlines()
    names = {inventory.canonical(line.partition("[")[0]) for line in lines if not line.startswith("#")}
    held = {name for name, _ in inventory.locked(LOCKS[lock])} | ({"torch"} if lock == "flexfleet" else set())
    assert names <= held, f"{names - held}: `make lock`"


def test_dockerfile_installs_nothing_but_the_locks() -> None:
    """And pip refuses what has no hash: PIP_REQUIRE_HASHES holds for every call but that for our own code, offline."""
    dockerfile = (ROOT / "components/Dockerfile").read_text()
    assert re.search(r"^ENV .*(?:\\\n.*)*PIP_REQUIRE_HASHES=1 PIP_NO_DEPS=1$", dockerfile, re.MULTILINE)
    calls = re.findall(r"(?:\S+=\S+ )*\S*pip install [^&\n\\;]*", dockerfile)
    files = {file for call in calls for file in re.findall(r"--requirement (\w+)\.txt", call)}
    assert files == set(LOCKS)
    (own,) = [call for call in calls if "--requirement" not in call]
    assert own == "PIP_REQUIRE_HASHES=0 PIP_NO_INDEX=1 pip install --no-build-isolation ."
    assert "REQUIRE_HASHES=0" not in dockerfile.replace(own, "")


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """A source of nothing but a changed wheel: the hash is what stops it."""
    (tmp_path / "zipp-4.1.2-py3-none-any.whl").write_bytes(b"something else")
    lock = tmp_path / "lock.txt"
    lock.write_text(re.search(r"^zipp==(?:.*\\\n)+.*\n", LOCKS["flexfleet"], re.MULTILINE)[0])  # type: ignore[index]
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--require-hashes", "--no-index"]
    where = ["--find-links", str(tmp_path), "--dest", str(tmp_path / "to"), "--requirement", str(lock)]
    done = subprocess.run([*pip, *where], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line", ["--extra-index-url https://elsewhere", "torch", "torch==1 @ https://elsewhere", "    --hash=md5:0"]
)
def test_locked_refuses_a_line_without_version_or_hash(line: str) -> None:
    with pytest.raises(BadInput):
        inventory.locked(f"a==1 \\\n{line}\n")


def test_licences_page_has_every_locked_package() -> None:
    page = (ROOT / "docs/licences.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    noted = {(name, version) for name, version, _, _ in rows if version != "version"}
    wanted = {key for name in LOCKS if name != "sbom" for key in inventory.locked(LOCKS[name])}
    machine = {key for key in wanted if key[0] == "torch"}  # one row: the machine that the page was written on
    assert noted & machine and noted - machine == wanted - machine, "`make sbom`"
    refused = [row for row in rows if row[1] not in ("version", "---") and not inventory.permitted(row[2])]
    assert refused == []


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("AGPL-3.0-only", False),
        ("GPL-2.0-only OR EPL-1.0", True),
        ("MIT AND GPL-2.0-only", False),
        ("MIT OR AGPL-3.0-only AND GPL-2.0-only", True),
        ("MPL-2.0 AND (Apache-2.0 OR AGPL-3.0-only)", True),
        ("AGPL-3.0-only AND (Apache-2.0 OR MIT)", False),
        ("GPL-2.0-only WITH GCC-exception-2.0", True),
        ("GPL-2.0-only WITH Other-exception", False),
    ],
)
def test_permitted_reads_spdx_expressions(expression: str, allowed: bool) -> None:
    assert inventory.permitted(expression) is allowed


class Package(Distribution):
    def __init__(self, name: str, **fields: str) -> None:
        self.fields = {"Name": name, "Version": "1"} | {k.replace("_", "-"): v for k, v in fields.items()}

    def read_text(self, filename: str) -> str | None:
        message = Message()
        for key, value in self.fields.items():
            message[key] = value
        return message.as_string() if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


def test_licence_is_read_from_package_metadata() -> None:
    classified = "License :: OSI Approved :: Apache Software License"
    assert inventory.licence(Package("a", License_Expression="MIT OR Apache-2.0")) == "MIT OR Apache-2.0"
    assert inventory.licence(Package("a", License="Apache 2.0")) == "Apache-2.0"
    whole = Package("a", License="The whole text, of which\n there is much", Classifier=classified)
    assert inventory.licence(whole) == "Apache-2.0"
    assert inventory.licence(Package("Pygit2", License="GPLv2 with linking exception")).endswith("GCC-exception-2.0")
    with pytest.raises(BadInput, match="SAID or KNOWN"):
        inventory.licence(Package("a"))
    with pytest.raises(IntegrityError, match="AGPL"):
        inventory.table({"image": [Package("a", License_Expression="AGPL-3.0-only")]})


def test_check_compares_the_bill_with_the_locks() -> None:
    packages = inventory.locked(LOCKS["torch"]) | inventory.locked(LOCKS["build"])
    components = [{"name": name, "version": version} for name, version in packages]
    assert inventory.check(json.dumps({"components": components}), [LOCKS["torch"], LOCKS["build"]]) == len(packages)
    one_machine = [c for c in components if c["version"] != "2.9.1"]
    inventory.check(json.dumps({"components": one_machine}), [LOCKS["torch"], LOCKS["build"]])
    old = json.dumps({"components": [{"name": "Setuptools", "version": "1"}]})
    with pytest.raises(IntegrityError, match="setuptools, torch"):
        inventory.check(old, [LOCKS["torch"], LOCKS["build"]])

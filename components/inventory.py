"""Checks the bill of materials of an image against its locks, and lists the licences of its packages, for `make sbom`.

python -m components.inventory check SBOM LOCK...             fails if the bill lacks a package of the locks
python -m components.inventory licences NAME=SITE_PACKAGES... prints the page docs/licences.md
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions

from fl_engine.core.errors import BadInput, IntegrityError
from fl_engine.core.text import path_of
from flexfleet.files.terminal import run_main

PERMITTED = frozenset(
    {"0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"}
    | {"EPL-1.0", "EPL-2.0", "GPL-2.0-only WITH GCC-exception-2.0", "HPND", "ISC", "LGPL-3.0-only", "MIT", "MIT-0"}
    | {"MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "ZPL-2.1", "Zlib"}
)
"""SPDX identifiers of licences that allow an image under Apache-2.0 to carry the package unchanged."""
SAID: dict[str, str] = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache License Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "Zope Public License": "ZPL-2.1",
}
"""Map the names that packages give their licences to SPDX identifiers. `BSD` may mean either of two; both are
permitted."""
KNOWN: dict[str, str] = {
    "antlr4-python3-runtime": "BSD-3-Clause",
    "faster-coco-eval": "Apache-2.0",
    "grandalf": "GPL-2.0-only OR EPL-1.0",
    "huey": "MIT",
    "pygit2": "GPL-2.0-only WITH GCC-exception-2.0",
    "skops": "MIT",
}
"""Licences of packages whose metadata lacks a usable name; taken from their licence files."""
SPDX = re.compile(r"\(?[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) \(?[A-Za-z0-9.+-]+\)?)*")
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)\s*(?:;\s*([^\\]*\S))?\s*\\?$")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str) -> dict[tuple[str, str], list[str]]:
    """Map each (name, version) in a lock's text to its sha256 sums. Raises BadInput for any other line."""
    pins: dict[tuple[str, str], list[str]] = {}
    sums: list[str] | None = None
    for line in lock.splitlines():
        if match := REQUIREMENT.match(line):
            sums = pins.setdefault((canonical(match[1]), match[2]), [])
        elif sums is not None and (match := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line)):
            sums.append(match[1])
        elif not line.startswith("#"):
            raise BadInput(f"a lock may have requirements and their hashes only, got {line!r}: run `make lock`")
    return pins


def check(bill: str | bytes, locks: Iterable[str]) -> int:
    """Return the number of packages in a CycloneDX bill of materials. Raises IntegrityError if the bill lacks a
    package of the locks in the locked version."""
    named = {(canonical(c["name"]), c.get("version", "")) for c in json.loads(bill)["components"]}
    wanted: dict[str, set[str]] = {}
    for lock in locks:
        for name, version in locked(lock):  # torch has another version for each architecture
            wanted.setdefault(name, set()).add(version)
    missing = [name for name, versions in sorted(wanted.items()) if not any((name, v) in named for v in versions)]
    if missing:
        raise IntegrityError(f"the bill of materials lacks the locked versions of {', '.join(missing)}")
    return len(named)


def licence(package: Distribution) -> str:
    """Return a package's licence as an SPDX expression. Raises BadInput if its metadata has no known licence."""
    name = canonical(package.name)
    said = package.metadata
    words = [c.rpartition(" :: ")[2] for c in said.get_all("Classifier") or () if c.startswith("License :: OSI")]
    stated: list[str] = [(said.get_all(field) or [""])[0].strip() for field in ("License-Expression", "License")]
    candidates = [KNOWN.get(name, ""), *(text for text in stated if "\n" not in text)]
    for given in (*candidates, " AND ".join(SAID.get(word, word) for word in words)):
        expression = SAID.get(given, given)
        if expression and (expression in PERMITTED or SPDX.fullmatch(expression)):
            return expression
    raise BadInput(f"{name} {package.version} has no known licence, got {[*stated, *words]}. Add it to SAID or KNOWN")


def permitted(expression: str) -> bool:
    """Return whether the image may carry a package under this SPDX expression.

    AND binds closer than OR. Parentheses may only hold alternatives of which one is required: A AND (B OR C).
    """
    if match := re.fullmatch(r"(.*?)\(([^()]+)\)(.*)", expression):
        return all(map(permitted, filter(None, (re.sub("^ AND | AND $", "", part) for part in match.groups()))))
    return any(all(name in PERMITTED for name in each.split(" AND ")) for each in expression.split(" OR "))


HEAD = """# Licences

The packages in the images, without flexfleet (Apache-2.0) and the base image; `make sbom` writes this page. The licence
text of each package lies beside it in the image. Torch's also has those of the libraries that are compiled into it.

| package | version | licence | image |
|---|---|---|---|
"""


def table(environments: dict[str, list[Distribution]]) -> str:
    """Return the page of licences. Raises IntegrityError if a licence is not permitted, BadInput if an environment is
    empty."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for image, packages in environments.items():
        if not packages:
            raise BadInput(f"{image} has no installed package")
        for package in packages:
            if canonical(package.name) != "pip":  # belongs to the base image
                rows.setdefault((canonical(package.name), package.version, licence(package)), []).append(image)
    refused = [f"{name} {version}: {said}" for name, version, said in rows if not permitted(said)]
    if refused:
        raise IntegrityError(f"licences that an image under Apache-2.0 may not carry: {'; '.join(sorted(refused))}")
    return HEAD + "".join(f"| {' | '.join(row)} | {', '.join(images)} |\n" for row, images in sorted(rows.items()))


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m components.inventory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = p.add_subparsers(dest="command", required=True)
    checks, licences = commands.add_parser("check"), commands.add_parser("licences")
    checks.add_argument("bill", type=path_of, metavar="SBOM")
    checks.add_argument("locks", type=path_of, nargs="+", metavar="LOCK")
    licences.add_argument("environments", nargs="+", metavar="NAME=SITE_PACKAGES")
    args = p.parse_args(argv)
    if args.command == "check":
        print(check(args.bill.read_bytes(), [lock.read_text("utf-8") for lock in args.locks]), "packages")
    else:
        given = dict(word.partition("=")[::2] for word in args.environments)
        print(table({name: list(distributions(path=[path])) for name, path in given.items()}), end="")
    return 0


if __name__ == "__main__":
    run_main(main)

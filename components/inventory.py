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
    {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "EPL-1.0", "EPL-2.0", "HPND", "ISC"}
    | {"LGPL-3.0-only", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "ZPL-2.1", "Zlib"}
)
"""SPDX identifiers of licences that allow an image under Apache-2.0 to carry the package unchanged."""
PERMITTED_WITH = frozenset({"Apache-2.0 WITH LLVM-exception", "GPL-2.0-only WITH GCC-exception-2.0"})
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
"""SPDX identifiers of the names that packages give their licence. `BSD` may mean either of two; both are permitted."""
KNOWN: dict[str, str] = {
    "antlr4-python3-runtime": "BSD-3-Clause",
    "faster-coco-eval": "Apache-2.0",
    "grandalf": "GPL-2.0-only OR EPL-1.0",
    "huey": "MIT",
    "pygit2": "GPL-2.0-only WITH GCC-exception-2.0",
    "skops": "MIT",
}
"""Licences of packages whose metadata states them in no usable form; taken from their licence files."""
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)\s*(?:;\s*([^\\]*\S))?\s*\\?$")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str) -> dict[tuple[str, str], list[str]]:
    """The sha256 sums of each (name, version) in a lock's text. Raises BadInput for a line that is neither a
    requirement nor the hash of one."""
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
    """The number of packages in a CycloneDX bill of materials. Raises BadInput if it is none, IntegrityError if a
    package of the locks is missing, or is there in another version."""
    try:
        named = {(canonical(c["name"]), c.get("version", "")) for c in json.loads(bill)["components"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"a bill of materials is JSON with `components`, each with a name ({error}): run `make sbom`"
        ) from error
    names = {name for name, _ in named}
    wanted: dict[str, set[str]] = {}
    for lock in locks:
        for name, version in locked(lock):
            wanted.setdefault(name, set()).add(version)
    missing = [n for n, versions in sorted(wanted.items()) if not any((n, v) in named for v in versions)]
    if missing:
        raise IntegrityError(
            "the bill of materials lacks "
            + ", ".join(n if n not in names else f"{n} in the locked version" for n in missing)
        )
    return len(named)


def licence(package: Distribution) -> str:
    """A package's licence as an SPDX expression. Raises BadInput if its metadata states none that is known here."""
    name = canonical(package.name)
    said = package.metadata
    words = [c.rpartition(" :: ")[2] for c in said.get_all("Classifier") or () if c.startswith("License :: OSI")]
    stated: list[str] = [(said.get_all(field) or [""])[0].strip() for field in ("License-Expression", "License")]
    candidates = [KNOWN.get(name, ""), *(text for text in stated if "\n" not in text)]
    for given in (*candidates, " AND ".join(SAID.get(word, word) for word in words)):
        expression = SAID.get(given, given)
        if expression and permitted(expression) is not None:
            return expression
    raise BadInput(f"{name} {package.version} says {[*stated, *words]} of its licence: add it to SAID or KNOWN")


def permitted(expression: str) -> bool | None:
    """Whether the image may carry a package under this SPDX expression (see PERMITTED); None if it is not valid."""
    tokens: list[str] = re.findall(r"[()]|[A-Za-z0-9.+-]+", expression)
    if " ".join(tokens).replace("( ", "(").replace(" )", ")") != expression:
        return None

    def either() -> bool:
        allowed = both()
        while tokens[:1] == ["OR"]:
            tokens.pop(0)
            allowed = both() or allowed
        return allowed

    def both() -> bool:
        allowed = one()
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            allowed = one() and allowed
        return allowed

    def one() -> bool:
        if tokens[:1] == ["("]:
            tokens.pop(0)
            allowed = either()
            if (closing := tokens.pop(0)) != ")":
                raise ValueError(closing)
            return allowed
        licence = name()
        if tokens[:1] == ["WITH"]:
            tokens.pop(0)
            return f"{licence} WITH {name()}" in PERMITTED_WITH
        return licence in PERMITTED

    def name() -> str:
        if (token := tokens.pop(0)) in ("(", ")", "AND", "OR", "WITH"):
            raise ValueError(token)
        return token

    try:
        allowed = either()
    except (IndexError, ValueError):
        return None
    return None if tokens else allowed


HEAD = """# Licences

The packages in the images, without flexfleet (Apache-2.0) and the base image; `make sbom` writes this page. The licence
text of each package lies beside it in the image. Torch's also has those of the libraries that are compiled into it.

| package | version | licence | image |
|---|---|---|---|
"""


def table(environments: dict[str, list[Distribution]]) -> str:
    """The page of licences. Raises IntegrityError if one is not permitted, BadInput where no package is installed."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for image, packages in environments.items():
        if not packages:
            raise BadInput(f"{image}: no package is installed there")
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
        if bare := [name for name, path in given.items() if not path]:
            raise BadInput(f"NAME=SITE_PACKAGES is expected, got {bare[0]!r}")
        print(table({name: list(distributions(path=[path])) for name, path in given.items()}), end="")
    return 0


if __name__ == "__main__":
    run_main(main)

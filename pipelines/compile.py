"""Writes the pipelines as the YAML that Kubeflow runs: `python -m pipelines.compile`.

The forms come from the schema through form.json (`python -m components.describe`). The files in pipelines/compiled have
the defaults and are checked in. If environment variables describe a cluster (FLEXFLEET_IMAGE, ...), the command writes
files for that cluster into another folder. Upload those in the UI.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from fl_engine.core.errors import ConfigError, FlexfleetError
from flexfleet.kubeflow.retarget import VARIABLES, documents, retarget
from pipelines.compare import comparison
from pipelines.form import FIELDS
from pipelines.nightly import nightly
from pipelines.train import train
from pipelines.tune import tuning

PIPELINES: dict[str, Any] = {"train": train, "compare": comparison, "tune": tuning, "nightly": nightly}
COMPILED = Path(__file__).parent / "compiled"
"""The files with the defaults, which are checked in and shipped in the package."""
ADAPTED = Path(__file__).parents[1] / "build" / "pipelines"
"""The files for the cluster that the environment describes, which git ignores."""


def compiled(name: str) -> str:
    """The specification of a pipeline, with the defaults; the same source gives the same text."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        compiler.Compiler().compile(PIPELINES[name], str(path))
        text = path.read_text("utf-8")
    spec, *platform = documents(text)
    form = spec["root"]["inputDefinitions"]["parameters"]
    for name, about in form.items():
        # The SDK does not support `Literal`, but the specification has `literals`.
        if name in FIELDS and FIELDS[name].choices:
            about["literals"] = list(FIELDS[name].choices)
    told = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return told + yaml.safe_dump_all([spec, *platform], sort_keys=True, allow_unicode=True)


def folder_of(out: Path | None, variables: Collection[str]) -> Path:
    """Return the folder for the files: `out`, else the one that fits the environment, which sets `variables`. Raises
    ConfigError for a cluster's files in COMPILED, because the files there have the defaults and are checked in."""
    if out is None:
        return ADAPTED if variables else COMPILED
    if variables and out.resolve() == COMPILED.resolve():
        raise ConfigError(
            f"--out {out}: the files in this folder have the defaults and are checked in, but the environment sets "
            f"{', '.join(variables)}. Choose another folder, or leave out --out to use {_short(ADAPTED)}"
        )
    return out


def _short(path: Path) -> str:
    """The path from the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    p.add_argument("--check", action="store_true", help="change nothing; exit with 2 if a file is out of date")
    p.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the files (default: build/pipelines if the environment describes a cluster, else "
        "pipelines/compiled)",
    )
    args = p.parse_args(argv)
    folder, stale = folder_of(args.out, [name for name in VARIABLES if os.environ.get(name)]), []
    for name in PIPELINES:
        path, text = folder / f"{name}.yaml", retarget(compiled(name), os.environ)
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(_short(path))
    if args.check and stale:
        names = ", ".join(map(_short, stale))
        print(f"error: out of date with the source: {names}; run `python -m pipelines.compile`", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlexfleetError as error:  # as `terminal.run_main`, which would import the configuration
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

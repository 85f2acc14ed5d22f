"""Compile the pipelines to YAML for Kubeflow with `python -m pipelines.compile`.

The forms are read from form.json, which `python -m components.describe` creates. The compiled files in
pipelines/compiled contain the defaults and are checked in. If environment variables describe a cluster
(FLEXFLEET_IMAGE, ...), the command writes files for that cluster into build/pipelines. Upload these files to Kubeflow.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from fl_engine.core.errors import FlexfleetError
from flexfleet.kubeflow.retarget import VARIABLES, documents, retarget
from pipelines.compare import comparison
from pipelines.form import FIELDS
from pipelines.nightly import nightly
from pipelines.train import train
from pipelines.tune import tuning

PIPELINES: dict[str, Any] = {"train": train, "compare": comparison, "tune": tuning, "nightly": nightly}
COMPILED = Path(__file__).parent / "compiled"
"""Folder for compiled files with the defaults. These files are checked in and shipped in the package."""
ADAPTED = Path(__file__).parents[1] / "build" / "pipelines"
"""Folder for compiled files that are adapted to the cluster in the environment variables. Git ignores this folder."""


def compiled(name: str) -> str:
    """Return the specification of a pipeline with the defaults. The same source always produces the same YAML."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        compiler.Compiler().compile(PIPELINES[name], str(path))
        text = path.read_text("utf-8")
    spec, *platform = documents(text)
    form = spec["root"]["inputDefinitions"]["parameters"]
    for name, about in form.items():
        # The pipeline specification supports `literals`, but the SDK does not support the type `Literal`.
        if name in FIELDS and FIELDS[name].choices:
            about["literals"] = list(FIELDS[name].choices)
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return comments + yaml.safe_dump_all([spec, *platform], sort_keys=True, allow_unicode=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    p.add_argument("--check", action="store_true", help="change nothing; exit with 2 if a file is out of date")
    args = p.parse_args(argv)
    folder = ADAPTED if any(os.environ.get(name) for name in VARIABLES) else COMPILED
    stale = []
    for name in PIPELINES:
        path, text = folder / f"{name}.yaml", retarget(compiled(name), os.environ)
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path)
    if args.check and stale:
        names = ", ".join(map(str, stale))
        print(f"error: out of date with the source: {names}; run `python -m pipelines.compile`", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlexfleetError as error:  # Do not use `terminal.run_main`, which imports flexfleet.config.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

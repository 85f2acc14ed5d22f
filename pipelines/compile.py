"""Writes the pipelines as the YAML that Kubeflow runs: `python -m pipelines.compile`.

The forms come from the schema through form.json (`python -m components.describe`). The files are checked in with the
defaults. For a cluster with other settings, compile with environment variables (FLEXFLEET_IMAGE, ...) and upload the
files in the UI.
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
from flexfleet.kubeflow.retarget import documents, retarget
from pipelines.compare import comparison
from pipelines.form import FIELDS
from pipelines.nightly import nightly
from pipelines.train import train
from pipelines.tune import tuning

PIPELINES: dict[str, Any] = {"train": train, "compare": comparison, "tune": tuning, "nightly": nightly}
COMPILED = Path(__file__).parent / "compiled"


def compiled(name: str) -> str:
    """The specification of a pipeline, with the defaults; the same source gives the same text."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        compiler.Compiler().compile(PIPELINES[name], str(path))
        text = path.read_text("utf-8")
    spec, *platform = documents(text)
    form = spec["root"]["inputDefinitions"]["parameters"]
    for name, about in form.items():
        if (
            name in FIELDS and FIELDS[name].choices
        ):  # the SDK takes no `Literal`, but the specification knows `literals`
            about["literals"] = list(FIELDS[name].choices)
    told = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return told + yaml.safe_dump_all([spec, *platform], sort_keys=True, allow_unicode=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    p.add_argument("--check", action="store_true", help="change nothing; exit with 2 if a file is out of date")
    args = p.parse_args(argv)
    stale = []
    for name in PIPELINES:
        path, text = COMPILED / f"{name}.yaml", retarget(compiled(name), os.environ)
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
    except FlexfleetError as error:  # as `terminal.run_main`, which would import the configuration
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

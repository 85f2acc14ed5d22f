"""Writes the files that are generated from the schema: `python -m components.describe`.

params.yaml is for people, pipelines/form.json for the forms of the pipelines. Run `python -m pipelines.compile` after
it, which reads form.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flexfleet.config import Config, flatten
from flexfleet.config.form_fields import LISTED, SHORT, STUDY
from flexfleet.config.parameters import NAMES, everything
from flexfleet.config.params_file import params_yaml

ROOT = Path(__file__).parents[1]
WORDS = {"dataset": "data set", "model": "network", "algorithm": "algorithm"}
"""The words for the fields whose values are registered names."""
PARAMS, FORM = ROOT / "params.yaml", ROOT / "pipelines" / "form.json"


def form_json() -> str:
    """Return default, meaning and choices of each parameter in the forms, as JSON."""
    defaults, rows = flatten(Config()), {row.name: row for row in everything()}
    fields = {
        name: {"default": defaults[path], "meaning": rows[path].meaning, "choices": rows[path].choices}
        for name, path in (SHORT | STUDY).items()
    }
    for name, path in LISTED.items():
        fields[name] |= {
            "meaning": f'A registered {WORDS[name]}. A class of your own goes into `advanced`: {{"{path}": '
            '"package.module:NAME"}.',
            "choices": sorted(NAMES[path]),
        }
    return json.dumps(fields, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m components.describe", description=__doc__)
    p.add_argument("--check", action="store_true", help="change nothing; exit with 2 if a file is out of date")
    args = p.parse_args(argv)
    wanted = {PARAMS: params_yaml(), FORM: form_json()}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
    if args.check and stale:
        names = ", ".join(map(str, stale))
        print(f"error: out of date with the schema: {names}; run `python -m components.describe`", file=sys.stderr)
        return 2
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Generate params.yaml, the page of error codes and pipelines/form.json with `python -m components.describe`.

The file form.json contains the fields of the pipelines' forms. Run `python -m pipelines.compile` afterwards, because
that command reads form.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_engine.core import errors
from flexfleet.config import Config, flatten
from flexfleet.config.dotted import LISTED, SHORT, STUDY
from flexfleet.config.parameters import NAMES, everything, params_yaml

ROOT = Path(__file__).parents[1]
WORDS = {"dataset": "data set", "model": "network", "algorithm": "algorithm"}
"""Map each form field that selects a registered component to the word for this component in the form."""
PARAMS, FORM, ERRORS = ROOT / "params.yaml", ROOT / "pipelines" / "form.json", ROOT / "docs" / "reference" / "errors.md"
ERRORS_HEAD = """# Errors

An expected error is one line on stderr, `error: ...`. With `--json`, every error is one object on stdout:

```json
{"error": {"code": "config.out_of_range", "path": "partition.alpha", "message": "...", "exit_code": 2}}
```

`path` is the dotted name of the wrong parameter, or null. If several parameters are wrong, `errors` contains an object
for each. Codes are stable; messages may change. In Python, errors are `flexfleet.FlexfleetError` with these fields.

| code | exit code | cause | solution |
|---|---|---|---|
"""


def form_json() -> str:
    """Return the default, description and choices of each form field as JSON."""
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


def errors_md() -> str:
    """Return the page of error codes. If no error class has a code such as `config.unknown`, the page shows the exit
    code of the class with the code `config`."""
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    exits = {each.code: each.exit_code for each in classes if issubclass(each, errors.FlexfleetError)}
    return ERRORS_HEAD + "".join(
        f"| `{code}` | {exits.get(code) or exits[code.partition('.')[0]]} | {cause} | {cure} |\n"
        for code, (cause, cure) in sorted(errors.CODES.items())
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m components.describe", description=__doc__)
    p.add_argument("--check", action="store_true", help="change nothing; exit with 2 if a file is out of date")
    args = p.parse_args(argv)
    wanted = {PARAMS: params_yaml(), FORM: form_json(), ERRORS: errors_md()}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
    if args.check and stale:
        names = ", ".join(map(str, stale))
        print(f"error: out of date with the source: {names}; run `python -m components.describe`", file=sys.stderr)
        return 2
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

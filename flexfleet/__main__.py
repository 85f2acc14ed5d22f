"""Entry point of the command `flexfleet`, also as `python -m flexfleet` if the command is not on the PATH."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Call `cli.main`. Ctrl-C prints a single line, and with `--json` an object on stdout, instead of a traceback, even
    while modules are being imported."""
    try:
        from flexfleet.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        from fl_engine.core.errors import Interrupted

        about = Interrupted("interrupted").as_json()
        if "--json" in sys.argv:
            print(json.dumps({"error": about}), flush=True)
        print(about["message"], file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()

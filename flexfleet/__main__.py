"""Entry point of the command `flexfleet`, also as `python -m flexfleet` if the command is not on the PATH."""

from __future__ import annotations

import sys


def main() -> None:
    """Call `cli.main`. Ctrl-C prints a single line instead of a traceback, even while modules are being imported."""
    try:
        from flexfleet.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""The console command `flexfleet`; as `python -m flexfleet` where its script is not on the path."""

from __future__ import annotations

import sys


def main() -> None:
    """As `cli.main`. Ctrl-C is one line also while modules are imported."""
    try:
        from flexfleet.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""Execute assignments on this machine, until the server is silent.

Exit codes: 0: the server was silent for too long, or one lease is over (--once); 42: the device was revoked, or cannot
take part; 143: SIGTERM, or its terminal was closed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_engine.core.errors import FlexfleetError, Stopped
from fl_engine.core.text import at_home, path_of
from flexfleet.files import terminal
from flexfleet.files.signals import stopping_at_once


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--invite", type=at_home, required=True, metavar="FILE", help="the invitation: a file, or an https address"
    )
    p.add_argument(
        "--folder", type=path_of, metavar="DIR",
        help="where the device stores its key (default: $STATE_DIRECTORY, else ~/.local/state/flexfleet/NAME)",
    )  # fmt: skip
    p.add_argument(
        "--device", metavar="NAME", help="the torch device that trains here, e.g. cuda (default: the processor)"
    )  # fmt: skip
    p.add_argument("--once", action="store_true", help="end after one assignment")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p)
    terminal.add_loudness(p)
    args = terminal.parsed(p, argv)
    try:
        # The first process of a container ignores SIGTERM without a handler. Importing torch takes seconds, and kills
        # the process on some processors, which `run_main` reports.
        with stopping_at_once():
            from flexfleet.worker.server import run

            return run(args)
    except Stopped:
        return 143
    except FlexfleetError as error:
        if where := os.environ.get("FLEXFLEET_TERMINATION_LOG"):  # Kubernetes shows it as the reason
            Path(where).write_text(str(error)[:2000], "utf-8")
        raise


if __name__ == "__main__":
    try:
        terminal.run_main(main)
    except SystemExit as end:
        # Tearing down torch takes seconds, in which a pod would delay those of the next round.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)

"""Execute assignments on this machine until the server sends no new messages.

Exit code 0: no new message arrived before the timeout, or the assignment has ended (--once). Exit code 42: the device
was revoked or cannot run assignments. Exit code 143: the process received SIGTERM, or the terminal was closed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_engine.core.errors import FlexfleetError, Stopped
from fl_engine.core.text import path_of
from flexfleet.files import owner_limits, terminal
from flexfleet.files.signals import stopping_at_once


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--invite", required=True, metavar="FILE", help="file or https address of the invitation")
    p.add_argument(
        "--folder", type=path_of, metavar="DIR",
        help="folder for the device's key (default: $STATE_DIRECTORY or ~/.local/state/flexfleet/NAME)",
    )  # fmt: skip
    p.add_argument("--device", metavar="NAME", help="torch device for training, for example cuda (default: the CPU)")
    owner_limits.add_options(p)
    p.add_argument("--once", action="store_true", help="end after one assignment")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p)
    terminal.add_loudness(p)
    return serve(terminal.parsed(p, argv))


def serve(args: argparse.Namespace) -> int:
    """Run a worker. Returns the exit code."""
    try:
        # Without a handler, the first process of a container ignores SIGTERM. Set the handler first, because importing
        # torch takes seconds. If the import crashes, `run_main` reports the error.
        with stopping_at_once():
            from flexfleet.worker.server import run

            run(args)
    except Stopped:
        return 143
    except (FlexfleetError, OSError) as error:
        if where := os.environ.get("FLEXFLEET_TERMINATION_LOG"):  # Kubernetes shows this file
            Path(where).write_text(str(terminal.expected(error))[:2000], "utf-8")
        raise
    return 0


if __name__ == "__main__":
    try:
        terminal.run_main(main)
    except SystemExit as end:
        # Skip the shutdown of torch, which takes seconds and would delay the pods of the next round.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)

"""The options of `flexfleet agent`, also for the process that takes its place."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

SILENCE_S = 604_800.0
"""Seven days: after that no URL is good any more."""
RECYCLE = 200


def _silence(text: str) -> float:
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")


def _recycle(text: str) -> int:
    with suppress(ValueError):
        if (orders := int(text)) >= 1:
            return orders
    raise argparse.ArgumentTypeError(f"expected a number of orders, at least 1, got {text!r}")


def add(p: argparse.ArgumentParser) -> None:
    p.add_argument("--invite", required=True, metavar="FILE", help="the invitation: a file, or an https address")
    p.add_argument(
        "--folder", type=Path, metavar="DIR",
        help="where the device remembers its key (default: $STATE_DIRECTORY, else ~/.local/state/flexfleet/NAME)",
    )  # fmt: skip
    p.add_argument(
        "--silence", type=_silence, default=SILENCE_S, metavar="S",
        help="end when the server has been silent for so many seconds (default: %(default).0f)",
    )  # fmt: skip
    p.add_argument(
        "--recycle", type=_recycle, default=RECYCLE, metavar="N",
        help="start the process anew after so many orders (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--once", action="store_true", help="end after one order")


def again(args: argparse.Namespace) -> list[str]:
    """The same options once more."""
    given = [f"--invite={args.invite}", f"--silence={args.silence}", f"--recycle={args.recycle}"]
    return [*given, *([f"--folder={args.folder}"] if args.folder else []), *(["--once"] if args.once else [])]

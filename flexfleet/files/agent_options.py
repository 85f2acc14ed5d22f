"""The options of `flexfleet agent`, also for the process that takes its place."""

from __future__ import annotations

import argparse

from fl_engine.core.addresses import at_home, path_of
from fl_engine.core.errors import ConfigError

SILENCE_S = 604_800.0
"""Seven days: after that no URL is good any more."""
RECYCLE = 200


def add(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--invite", type=at_home, required=True, metavar="FILE", help="the invitation: a file, or an https address"
    )
    p.add_argument(
        "--folder", type=path_of, metavar="DIR",
        help="where the device remembers its key (default: $STATE_DIRECTORY, else ~/.local/state/flexfleet/NAME)",
    )  # fmt: skip
    p.add_argument(
        "--silence", type=float, default=SILENCE_S, metavar="S",
        help="end when the server has been silent for so many seconds (default: %(default).0f)",
    )  # fmt: skip
    p.add_argument(
        "--recycle", type=int, default=RECYCLE, metavar="N",
        help="start the process anew after so many orders (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--device", metavar="NAME", help="the torch device that trains here, e.g. cuda (default: the processor)"
    )  # fmt: skip
    p.add_argument("--once", action="store_true", help="end after one order")


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if not args.silence > 0:  # NaN is not
        raise ConfigError(f"--silence says after how many seconds to end, above 0; got {args.silence:g}")
    if args.recycle < 1:
        raise ConfigError(f"--recycle says after how many orders to start anew, at least 1; got {args.recycle}")


def again(args: argparse.Namespace) -> list[str]:
    """The same options once more."""
    given = [f"--invite={args.invite}", f"--silence={args.silence}", f"--recycle={args.recycle}"]
    flags = [f"--{name}" for name in ("once", "quiet", "verbose") if getattr(args, name)]
    named = [f"--{name}={value}" for name in ("folder", "device") if (value := getattr(args, name))]
    return [*given, *named, *flags]

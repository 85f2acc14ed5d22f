"""The options of a worker, for the command line (which does not import torch) and for the process that replaces it."""

from __future__ import annotations

import argparse

from fl_engine.core.addresses import at_home, path_of


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


def again(args: argparse.Namespace) -> list[str]:
    """Return the same options as a list."""
    flags = [f"--{name}" for name in ("once", "quiet", "verbose") if getattr(args, name)]
    named = [f"--{name}={value}" for name in ("folder", "device") if (value := getattr(args, name))]
    return [f"--invite={args.invite}", *named, *flags]

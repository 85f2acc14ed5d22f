"""Comparisons whose runs need no processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from flexfleet import cli
from flexfleet.comparisons.side_by_side import BEGINS, Command
from flexfleet.files import terminal
from flexfleet.steps import share

MAINS = {"flexfleet.cli": cli.dispatch, "flexfleet.steps.share": share.main}


def in_this_process(jobs: Sequence[Command], at_once: int) -> dict[str, int]:
    """What `side_by_side` does, without the seconds that a process takes to import torch."""
    codes: dict[str, int] = {}
    for job in jobs:
        with open(job.log, "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            print(f"{BEGINS}{job.module} {' '.join(job.argv)}")
            with pytest.raises(SystemExit) as end:
                terminal.run_main(lambda _, job=job: MAINS[job.module](list(job.argv)))
        codes[job.name] = int(end.value.code or 0)
    return codes

"""The command of a client's pod: reads its assignment and answers its orders (`flexfleet.steps.answer`). With --stay it
waits for orders as long as the run lasts (`flexfleet.steps.agent`, whose options follow).

Exit codes: 0: every order is answered (a failure is an answer too); 42: trying again will not help; 143: SIGTERM; any
other: trying again may help.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fl_engine.core.addresses import path_of
from fl_engine.core.errors import BadInput, ClientError, EnvironmentFailure, IntegrityError, Stopped
from flexfleet.files import terminal
from flexfleet.files.signals import stopping_at_once


def main(argv: Sequence[str] | None = None) -> int:
    # Without a handler the first process of a container ignores SIGTERM, and is killed after the grace period. Torch,
    # which takes seconds to import, is imported after this.
    try:
        with stopping_at_once():
            return run(argv)
    except Stopped:
        return 143


def run(argv: Sequence[str] | None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("assignment", type=path_of, metavar="FILE")
    p.add_argument("--stay", action="store_true", help="FILE is an invitation; the options of the agent follow")
    args, more = p.parse_known_args(argv)
    if args.stay:
        from flexfleet.steps import agent

        return agent.main([f"--invite={args.assignment}", *more])
    if more:
        p.error(f"unknown: {' '.join(more)}")

    from fl_engine.exchange.assignment import Assignment
    from flexfleet.steps.answer import answer

    failed = os.environ.get("JOB_INDEX_FAILURES", "")
    try:
        answer(Assignment.read(args.assignment), int(failed) if failed.isdecimal() else 0)
    except (ClientError, BadInput) as error:
        print(f"error: {error}", file=sys.stderr)
        return ClientError.exit_code
    except (EnvironmentFailure, IntegrityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    terminal.run_main(main)

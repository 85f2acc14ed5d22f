"""Attacks a run as its clients could, and reports the attacks that succeed.

    python -m tests.harness.attacks --json
    python -m tests.harness.attacks --only copy-source

Each attack is a function in a table. The S3 server has to refuse those in `urls`; the engine has to refuse those in
`stored` and `runs`. The servers are Ceph's radosgw, which checks signatures, and moto, which
does not: attacks on moto that only a server can refuse are reported under `not_enforced`. Exit code 0: all attacks were
refused; 1: some were not; 6: radosgw is not installed, and nothing was tried. The log goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.attacks import runs, stored, urls
from tests.harness.attacks.servers import served
from tests.harness.attacks.table import Attack, Tally, try_all
from tests.harness.world import missing

log = logging.getLogger("flexfleet.attacks")


def campaign(only: str) -> Tally:
    """Tries all attacks whose name contains `only`."""

    def chosen(attacks: Sequence[Attack]) -> list[Attack]:
        return [attack for attack in attacks if only in attack.name]

    tally = Tally()
    runs.control(runs.RUINS)
    try_all(chosen(runs.ATTACKS), tally)
    for kind in ("radosgw", "moto"):
        theirs = chosen(urls.ATTACKS), chosen(stored.attacks(kind))
        if not any(theirs):
            continue
        with tempfile.TemporaryDirectory(prefix="flexfleet-attacks-") as folder, served(kind, Path(folder)) as world:
            for attacks in theirs:
                try_all(attacks, tally, world, where=kind, enforces=kind != "moto")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.attacks", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="try only attacks whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    why = missing("radosgw")
    if why is not None:
        print(f"{why}: attacks that a server has to refuse cannot be tried without it", file=sys.stderr)
        return 6
    found = campaign(args.only)
    if args.json:
        print(json.dumps(found.json()))
    else:
        print(f"{len(found.refused)} attacks were refused, {len(found.open)} were not", *found.open, sep="\n")
    return 1 if found.open else 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("flexfleet.attacks").setLevel(logging.INFO)
    logging.getLogger("flexfleet").setLevel(logging.ERROR)  # hides the runs' warnings of refused updates
    sys.exit(main())

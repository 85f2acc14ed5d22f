"""Step 6 if each step wrote its own folder: make one run folder from them, with its report and result.json.

The folder has the layout of `flexfleet run` without the ledger, so `flexfleet report` can compare it with others.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from flexfleet.config import PRIVATE, Config, parse_with_algorithm, public
from flexfleet.files import terminal
from flexfleet.files.artifacts import Result, RunFile
from flexfleet.files.run_status import tally_in
from flexfleet.pipeline import own_code
from flexfleet.pipeline.prepare import Resolved, unchanged
from flexfleet.pipeline.resume import store_of
from flexfleet.pipeline.run import conclude
from flexfleet.reports.report import table


def finish(
    given: Config, run: Path, partition: Path, pretrain: Path, pool: Path, evaluation: Path, out: Path
) -> Result:
    """Make a complete run folder in `out` from the folders of the steps; `run` is federate's. `given` says what is
    published, and has the passwords of addresses, which the run's own record leaves out."""
    shutil.copytree(run, out, dirs_exist_ok=True)
    for name, folder in (("partition", partition), ("pretrain", pretrain), ("pool", pool)):
        shutil.copytree(folder, out / name, dirs_exist_ok=True)
    for name in ("evaluation.json", "confusion.json"):
        shutil.copyfile(evaluation / name, out / name)
    file = RunFile.read(out / "run.json")
    own_code.enable(file, out)
    told, algorithm = parse_with_algorithm(own_code.stored(file), stored=True)
    config = _published(told, given)
    folder = Path(config.run.store) / file.run_id
    return conclude(Resolved(config, algorithm), out, store_of(config, file.run_id, folder if folder.is_dir() else out))


def _published(config: Config, given: Config) -> Config:
    """The configuration of the run, with the passwords of addresses that are equal in both, and with what is to be
    published now."""
    told = public(given)
    same = {name: getattr(given, name) for name in PRIVATE if getattr(told, name) == getattr(config, name)}
    return config.model_copy(update={**same, "publish": given.publish})


def main(argv: Sequence[str] | None = None) -> int:
    reads = {"partition": "partition", "pretrain": "pretrain", "pool": "model_pool", "evaluation": "evaluate"}
    p = terminal.step_parser(__doc__ or "", run="federate", **reads)
    args = terminal.parsed(p, argv)
    steps = (args.partition, args.pretrain, args.pool, args.evaluation)
    with unchanged(args) as resolved:
        result = finish(resolved.config, args.run, *steps, args.out)
    terminal.show(table([args.out]))
    terminal.show(f"report: {result.report}")
    tally_in(args.out).check()
    return 0


if __name__ == "__main__":
    terminal.run_main(main)

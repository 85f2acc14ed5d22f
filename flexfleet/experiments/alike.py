"""What runs of a comparison must have in common: settings, data, partition and code. The functions give a line for each
thing in which runs differ and must not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexfleet.config import moves
from flexfleet.pipeline import share
from flexfleet.reports.report import COMPARED, NONE, Run, plain


def is_shared(key: str) -> bool:
    """Whether all runs of a comparison must have the same value of this parameter."""
    return key != "seed" and moves(key) in COMPARED


def unequal(runs: Mapping[str, Run], varied: Sequence[str] = (), *, algorithm: bool = True) -> list[str]:
    """A line for each parameter in which runs differ but must not. They may differ in the `varied` parameters, the
    algorithm's (unless `algorithm` is false), the seed, and parameters that change only the last bits."""
    shared = (key for run in runs.values() for key in run.config if is_shared(key) and key not in varied)
    keys = dict.fromkeys(key for key in shared if not (algorithm and key.startswith("algorithm")))
    lines = []
    for key in keys:
        values = {name: plain(run.settings.get(key)) for name, run in runs.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} ({name})" for name, value in values.items()))
    return lines


def other_partitions(runs: Mapping[str, Run]) -> list[str]:
    """A line for each group of runs that have the same partition settings and still different partitions."""
    settings = {name: sorted(share.settings(run.settings).items()) for name, run in runs.items()}
    return _apart("the partition itself", {name: run.file.partition_sha256 for name, run in runs.items()}, settings)


def other_data(runs: Mapping[str, Run]) -> list[str]:
    """A line for each group of runs that have the same settings of the data and still different data."""

    def settings(run: Run) -> list[Any]:
        of_run = run.settings
        own = {key: of_run[key] for key in sorted(of_run) if key.startswith("dataset.") and is_shared(key)}
        is_cut = own.get("dataset.train_samples") or own.get("dataset.test_samples")
        # A seed draws the samples of a cut, and images are padded to what the network takes.
        by = ("model.name", *(("seed", "partition.seed") if is_cut else ()))
        return [own, *(of_run.get(key) for key in by)]

    digests = {name: run.partition.data_sha256 for name, run in runs.items()}
    return _apart("the data", digests, {name: settings(run) for name, run in runs.items()})


def other_code(runs: Mapping[str, Run]) -> list[str]:
    """A line for each piece of code of one's own that is another one in some of the runs."""
    lines = _apart("the code of run.code", {name: run.file.code_sha256 or NONE for name, run in runs.items()})
    for source in dict.fromkeys(source for run in runs.values() for source in run.file.sources):
        known = {name: run.file.sources for name, run in runs.items()}
        lines += _apart(f"the source of {source}", {name: of[source] for name, of in known.items() if source in of})
    return lines


def _apart(what: str, digests: Mapping[str, str], settings: Mapping[str, object] | None = None) -> list[str]:
    """A line for each group of runs that have the same settings and different digests."""
    groups: dict[str, dict[str, str]] = {}
    for name, digest in digests.items():
        groups.setdefault(repr((settings or {}).get(name)), {})[name] = digest[:12]
    return [
        f"{what} (sha256): " + ", ".join(f"{digest} ({name})" for name, digest in group.items())
        for group in groups.values()
        if len(set(group.values())) > 1
    ]

"""Computes the partition and the pre-training once for all runs of one seed of a comparison.

Both follow from data set, network, partition, noise, pre-training settings and seed. The folder records these values.
A run uses the pre-training if its inputs are equal (`pipeline.pretrain`), and otherwise computes its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.fields import Moves
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.files import terminal
from flexfleet.files.artifacts import Artifact
from flexfleet.pipeline.labels import CONTENTS, contents
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved, resolved_of
from flexfleet.pipeline.pretrain import is_known, pretrain

SECTIONS = ("dataset.", "partition.", "noise.", "model.", "pretrain.", "seed")
HELD_OUT = ("evaluate.on", "evaluate.held_out")
"""Settings that decide which labels become wrong with noise.labels."""
ABOUT = "shared.json"


class Shared(Artifact):
    """shared.json, written last: the settings of the folder, and digests of the files that they name."""

    settings: dict[str, Any]


def share(resolved: Resolved, out: Path) -> Path:
    """Write partition/, pretrain/ and shared.json into `out`. `resolved`: a run of the seed, whose algorithm needs
    preparations if any of them does."""
    (out / ABOUT).unlink(missing_ok=True)
    partition(resolved, out / "partition")
    pretrain(resolved, out / "partition", out / "pretrain")
    inputs = settings(configs.flatten(resolved.config)) | contents(resolved.config)
    return Shared(settings=inputs).write(out / ABOUT)


def fits(resolved: Resolved, shared: Path) -> bool:
    """Whether the folder holds everything that `share` would compute for this configuration."""
    try:
        return not _changed(resolved.config, shared) and is_known(resolved, shared / "partition", shared / "pretrain")
    except IntegrityError:
        return False


def adopt(resolved: Resolved, shared: Path, out: Path) -> None:
    """Copy partition/ into the run folder `out`, and pretrain/ if the run can use it. A run that pre-trains another
    network (for example one with early exits) computes its own. Raises ConfigError for other settings than the run's.
    """
    if changed := _changed(resolved.config, shared):
        lines = ", ".join(f"{name}: {before!r} -> {now!r}" for name, (before, now) in changed[:6])
        raise ConfigError(f"{shared} must have the settings of this run, which differ: {lines}")
    shutil.copytree(shared / "partition", out / "partition", dirs_exist_ok=True)
    pretrain(resolved, out / "partition", out / "pretrain", known=shared / "pretrain")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters by dotted name that partition and pre-training depend on, without the algorithm."""
    spared = config.get("noise.labels") and config.get("evaluate.on") == "clients"
    held_out = HELD_OUT if spared else ()
    return {
        key: value
        for key, value in config.items()
        if key in held_out or (key.startswith(SECTIONS) and configs.moves(key) is Moves.RESULT)
    }


def _changed(config: Config, shared: Path) -> list[tuple[str, tuple[Any, Any]]]:
    """Return the settings that differ: name, value of the folder, value of the configuration. Digests of files count
    only if both have them, because the files may exist only where `share` runs. Raises IntegrityError."""
    known = Shared.read(shared / ABOUT).settings
    wanted = settings(configs.flatten(config)) | contents(config, needed=False)
    lacking = (known.keys() ^ wanted.keys()) & set(CONTENTS)
    names = sorted((known.keys() | wanted.keys()) - lacking)
    return [(k, (known.get(k), wanted.get(k))) for k in names if known.get(k) != wanted.get(k)]


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "")
    args = terminal.parsed(p, argv)
    terminal.show(str(share(resolved_of(args), args.out)))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)

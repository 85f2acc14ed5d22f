"""Computes once what all runs of one seed of a comparison start from: the partition, and what the preparations make.

Both follow from data set, network, partition, noise, pre-training settings and seed. The folder records these, and only
runs with the same values use it. A run uses a preparation's result if its inputs are the same (`steps.pretrain`),
and computes its own if they are not.
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
"""They decide which of a client's labels stay right, where some become wrong."""
ABOUT = "shared.json"


class Shared(Artifact):
    """shared.json, written last: the settings from which the folder was computed, with digests of what they name."""

    settings: dict[str, Any]


def share(resolved: Resolved, out: Path) -> Path:
    """Writes partition/, pretrain/ and shared.json into `out`. `resolved`: of any run of the seed; if some algorithms
    ask for preparations, of a run with one of these, since `share` prepares only for them."""
    (out / ABOUT).unlink(missing_ok=True)
    partition(resolved, out / "partition")
    pretrain(resolved, out / "partition", out / "pretrain")
    inputs = settings(configs.flatten(resolved.config)) | contents(resolved.config)
    return Shared(settings=inputs).write(out / ABOUT)


def fits(resolved: Resolved, shared: Path) -> bool:
    """Whether the folder holds all that `share` would compute for this configuration."""
    try:
        return not _changed(resolved.config, shared) and is_known(resolved, shared / "partition", shared / "pretrain")
    except IntegrityError:
        return False


def adopt(resolved: Resolved, shared: Path, out: Path) -> None:
    """Copies partition/ into the run folder `out`, and what the run can use of pretrain/. A run whose algorithm
    pre-trains another network (for example one with early exits) uses the partition and pre-trains its own network.

    Raises ConfigError if the folder was computed with other settings than the run's.
    """
    if changed := _changed(resolved.config, shared):
        lines = ", ".join(f"{name}: {before!r} -> {now!r}" for name, (before, now) in changed[:6])
        raise ConfigError(f"{shared} was computed with other settings ({lines}): give one of this run's settings")
    shutil.copytree(shared / "partition", out / "partition", dirs_exist_ok=True)
    pretrain(resolved, out / "partition", out / "pretrain", known=shared / "pretrain")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted name, the parameters that partition and pre-training depend on. The algorithm is not among them, nor
    how it changes the network."""
    spared = config.get("noise.labels") and config.get("evaluate.on") == "clients"
    held_out = HELD_OUT if spared else ()
    return {
        key: value
        for key, value in config.items()
        if key in held_out or (key.startswith(SECTIONS) and configs.moves(key) is Moves.RESULT)
    }


def _changed(config: Config, shared: Path) -> list[tuple[str, tuple[Any, Any]]]:
    """By name, what the folder was computed from and what the configuration asks for, where these differ. A digest that
    one of them lacks does not count: files have to lie only where `share` runs, and earlier versions recorded none.
    Raises IntegrityError."""
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

"""Computes once what all runs of one seed of a comparison start from: the partition, and the pre-training on the proxy.

Both follow from data set, network, partition, pre-training settings and seed. The folder records these, and only runs
with the same values use it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.fields import Moves
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.files import terminal as common
from flexfleet.files.artifacts import Artifact
from flexfleet.steps.partition import partition
from flexfleet.steps.prepare import Resolved, resolved_of
from flexfleet.steps.pretrain import pretrain

SECTIONS = ("dataset.", "partition.", "model.", "pretrain.", "seed")
ABOUT = "shared.json"


class Shared(Artifact):
    """shared.json, written last: the settings from which the folder was computed."""

    settings: dict[str, Any]
    network: str | None
    """The network that was pre-trained; null: the algorithm needs no APoZ, so nothing was pre-trained."""


def share(resolved: Resolved, out: Path) -> Path:
    """Writes partition/, pretrain/ and shared.json into `out`. `resolved`: of any run of the seed; if some algorithms
    measure APoZ, of a run with one of these, since `share` pre-trains only for them."""
    (out / ABOUT).unlink(missing_ok=True)
    partition(resolved, out / "partition")
    pretrain(resolved, out / "partition", out / "pretrain")
    return Shared(settings=settings(resolved.config), network=network(resolved)).write(out / ABOUT)


def fits(resolved: Resolved, shared: Path) -> bool:
    """Whether the folder holds all that `share` would compute for this configuration."""
    try:
        about = Shared.read(shared / ABOUT)
    except IntegrityError:
        return False
    wanted = network(resolved)
    return about.settings == settings(resolved.config) and (wanted is None or about.network == wanted)


def adopt(resolved: Resolved, shared: Path, out: Path) -> None:
    """Copies partition/ and pretrain/ into the run folder `out`. A run whose algorithm pre-trains another network
    (for example one with early exits) uses the partition and pre-trains its own network.

    Raises ConfigError if the folder was computed with other settings than the run's.
    """
    about, wanted = Shared.read(shared / ABOUT), settings(resolved.config)
    changed = [k for k in sorted(about.settings.keys() | wanted.keys()) if about.settings.get(k) != wanted.get(k)]
    if changed:
        lines = ", ".join(f"{k}: {about.settings.get(k)!r} -> {wanted.get(k)!r}" for k in changed[:6])
        raise ConfigError(f"{shared} was computed with other settings ({lines}): give one of this run's settings")
    shutil.copytree(shared / "partition", out / "partition", dirs_exist_ok=True)
    trained = network(resolved)
    if trained is not None and trained == about.network:
        shutil.copytree(shared / "pretrain", out / "pretrain", dirs_exist_ok=True)
    else:
        pretrain(resolved, out / "partition", out / "pretrain")


def settings(config: Config) -> dict[str, Any]:
    """All parameters that partition and pre-training depend on. Not in it: how an algorithm changes the network."""
    return {key: value for key, value in configs.flatten(config).items() if decides(key)}


def decides(key: str) -> bool:
    """Whether partition and pre-training depend on the parameter of this dotted name."""
    return key.startswith(SECTIONS) and configs.moves(key) is Moves.RESULT


def network(resolved: Resolved) -> str | None:
    """The network that the algorithm pre-trains, with its options; None if it needs no APoZ."""
    return repr(resolved.family) if resolved.algorithm.needs_apoz else None


def main(argv: Sequence[str] | None = None) -> int:
    p = common.step_parser(__doc__ or "")
    args = p.parse_args(argv)
    print(share(resolved_of(args), args.out))
    return 0


if __name__ == "__main__":
    common.run_main(main)

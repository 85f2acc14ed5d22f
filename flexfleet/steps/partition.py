"""Step 1: cut the proxy from the training data, then give the clients theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fl_engine.core.samples import Data
from fl_engine.data import partitioning as partitions
from fl_engine.data.partitioning import Partition
from flexfleet.config import Config, cut_seed
from flexfleet.files import terminal as common
from flexfleet.steps.prepare import config_of, prepare


def partition(config: Config, out: Path) -> Path:
    """Writes partition.safetensors, partition.json and partition.svg (class x client) into `out`."""
    data, _ = prepare(config)
    parts = cut(config, data)
    partitions.draw(parts.counts, out / "partition.svg")
    return partitions.save(parts, out)


def cut(config: Config, data: Data) -> Partition:
    """The configured partition of these data. Raises PartitionError where there is none."""
    p = config.partition
    return partitions.partition(
        data,
        p.rule,
        p.clients,
        p.proxy,
        cut_seed(config),
        alpha=p.alpha,
        labels_per_client=p.labels_per_client,
        minimum=p.minimum,
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = common.parser(__doc__ or "")
    p.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = p.parse_args(argv)
    print(partition(config_of(args), args.out))
    return 0


if __name__ == "__main__":
    common.run_main(main)

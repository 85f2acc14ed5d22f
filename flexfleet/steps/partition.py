"""Step 1: cut the proxy from the training data, then divide the rest among the clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import PartitionError
from fl_engine.data import partitioning as partitions
from fl_engine.data.manual import owners
from fl_engine.data.partitioning import Partition
from fl_engine.datasets import kept
from fl_engine.exchange.client import Site
from fl_engine.exchange.server import LazyServer, ServerSite
from flexfleet.config import cut_seed
from flexfleet.files import terminal as common
from flexfleet.steps.labels import keep_clusters, noisy
from flexfleet.steps.prepare import Resolved, resolved_of

log = logging.getLogger("flexfleet")


def partition(resolved: Resolved, out: Path) -> Path:
    """Writes partition.safetensors, partition.json and partition.svg (label x client) into `out`."""
    config, data = resolved.config, resolved.data
    if kept.is_kept(config.dataset.name) and data.natural_client is not None and config.partition.rule != "natural":
        log.info(
            "%s: the data say whose each sample is, and are divided by partition.rule = %s; partition.rule = natural "
            "gives each client its own",
            data.name,
            config.partition.rule,
        )
    parts = cut(resolved)
    if parts.clusters is not None:
        keep_clusters(resolved.config, resolved.data, parts.clusters)
    if resolved.config.noise.labels:
        _ = resolved.family  # raises where the network does not fit the data
        parts = noisy(resolved.config, resolved.data, parts)
    partitions.draw(parts.counts, out / "partition.svg", parts.label)
    return partitions.save(parts, out)


def cut(resolved: Resolved) -> Partition:
    """The configured partition of the data, without the noise. Raises PartitionError if it is impossible."""
    p = resolved.config.partition
    if p.proxy_shared and resolved.config.noise.labels:
        raise PartitionError(
            "partition.proxy_shared gives clients the proxy's samples, and with noise.labels = "
            f"{resolved.config.noise.labels:g} these would have two labels, a wrong one there and the right one on the "
            "server: set partition.proxy_shared=false, or noise.labels=0"
        )
    owner = owners(Path(p.map), len(resolved.data.train_y)) if p.rule == "manual" and p.map is not None else None
    return partitions.partition(
        resolved.data,
        p.rule,
        p.clients,
        p.proxy,
        cut_seed(resolved.config),
        alpha=p.alpha,
        labels_per_client=p.labels_per_client,
        minimum=p.minimum,
        cap=p.cap,
        clusters=resolved.clusters,
        owner=owner,
        server_classes=p.server_classes,
        proxy_shared=p.proxy_shared,
    )


def site_of(resolved: Resolved, parts: Partition) -> Site:
    """Where clients will live, before there is a pool."""
    return Site(resolved.family, (), (), resolved.data, parts, resolved.config.seed)


def server_of(resolved: Resolved) -> ServerContext:
    """The server before there is a pool; its part of the data is cut when it is asked for."""
    device = resolved.config.run.devices[0]
    return LazyServer(lambda: ServerSite(site_of(resolved, cut(resolved)), device))


def main(argv: Sequence[str] | None = None) -> int:
    p = common.step_parser(__doc__ or "")
    args = p.parse_args(argv)
    print(partition(resolved_of(args), args.out))
    return 0


if __name__ == "__main__":
    common.run_main(main)

"""Step 1: cut the proxy from the training data, then divide the rest among the clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import DataError, PartitionError
from fl_engine.data import heat_map, local_data, partition_files, partitioning
from fl_engine.data.partition import Partition, hold_out
from fl_engine.data.partition_files import read_map
from fl_engine.data.partition_rules import Ints
from fl_engine.data.transforms import fingerprint
from fl_engine.exchange.client import Site
from fl_engine.rounds.server import LazyServer, ServerSite
from fl_engine.storage.store import canonical, sha256
from flexfleet.config import Config, cut_seed
from flexfleet.files import terminal
from flexfleet.pipeline.labels import keep_clusters, noisy
from flexfleet.pipeline.prepare import Resolved, unchanged

log = logging.getLogger("flexfleet")


def partition(resolved: Resolved, out: Path) -> Path:
    """Write partition.safetensors, partition.json and, unless clients have their own data, partition.svg (label x
    client) into `out`."""
    config, data = resolved.config, resolved.data
    if data.natural_client is not None and config.partition.rule != "natural":
        log.info(
            "%s has an owner for each sample, but partition.rule = %s ignores it. partition.rule = natural uses it",
            data.name,
            config.partition.rule,
        )
    parts = cut(resolved)
    if parts.rule == local_data.LOCAL:
        return partition_files.save(parts, out)
    if parts.clusters is not None:
        keep_clusters(resolved.config, resolved.data, parts.clusters)
    if resolved.config.noise.labels:
        _ = resolved.family  # raises where the network does not fit the data
        parts = noisy(resolved.config, resolved.data, parts, held_out(resolved.config, parts)[1])
    heat_map.draw(parts.counts, out / "partition.svg", parts.label)
    return partition_files.save(parts, out)


def cut(resolved: Resolved) -> Partition:
    """Return the configured partition without wrong labels. Raises PartitionError if it is impossible."""
    p = resolved.config.partition
    if p.rule == local_data.LOCAL:
        return local_data.of_server(resolved.data, p.clients, cut_seed(resolved.config))
    if p.proxy_shared and resolved.config.noise.labels:
        raise PartitionError(
            "partition.proxy_shared must be false with noise.labels, because the proxy's samples would have two labels"
        )
    owner = read_map(Path(p.map), len(resolved.data.train_y)) if p.rule == "manual" and p.map is not None else None
    return partitioning.partition(
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
    """The site of the clients before there is a pool."""
    return Site(resolved.family, (), (), resolved.data, parts, resolved.config.seed, most=most_of(resolved.config))


def most_of(config: Config) -> int | None:
    """The most samples that a client may report; None if the server knows the number."""
    return config.partition.most if config.partition.rule == local_data.LOCAL else None


def reads(config: Config, root: str | None) -> Config:
    """The configuration of a client whose data folder is `root`. If clients have their own data, `dataset.test_samples`
    applies only to the server."""
    dataset = {"root": root} if most_of(config) is None else {"root": root, "test_samples": None}
    return config.model_copy(update={"dataset": config.dataset.model_copy(update=dataset)})


def simulated(resolved: Resolved, site: Site) -> Site:
    """The site with the clients whose data folders this machine has (`partition.folders`); `site` itself if clients
    have no data of their own, or run elsewhere. Raises DataError and PartitionError."""
    config = resolved.config
    p = config.partition
    if p.rule != local_data.LOCAL or p.folders is None or config.run.apart:
        return site
    form, parts = local_data.Form.of(site.data), []
    for folder in local_data.folders(Path(p.folders), p.clients):
        try:
            own = Resolved(reads(config, str(folder)), resolved.algorithm).data
        except DataError as error:
            raise DataError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
        parts.append(form.normalises(own, str(folder), p.most))
    data, partition = local_data.joined(site.data, site.partition, parts)
    partition, held = held_out(config, partition)
    return replace(site, data=data, partition=partition, held=held)


def folders_sum(site: Site) -> str:
    """The sha256 of which client has which data, for a site of `simulated`."""
    sizes = [len(own) + len(site.held_by(client)) for client, own in enumerate(site.partition.clients)]
    return sha256(canonical([fingerprint(site.data), sizes]))


def held_out(config: Config, parts: Partition) -> tuple[Partition, tuple[Ints, ...]]:
    """What clients train on, and what each holds out. Clients that do not evaluate hold nothing out."""
    if config.evaluate.on == "server":
        return parts, ()
    return hold_out(parts, config.evaluate.held_out, cut_seed(config))


def server_of(resolved: Resolved) -> ServerContext:
    """The server before there is a pool. The data are partitioned when they are first used."""
    device = resolved.config.run.devices[0]
    return LazyServer(lambda: ServerSite(site_of(resolved, cut(resolved)), device))


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "")
    args = terminal.parsed(p, argv)
    with unchanged(args) as resolved:
        written = partition(resolved, args.out)
    terminal.show(str(written))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)

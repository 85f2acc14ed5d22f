"""Step 2: the algorithm's preparations (`fl_engine.preparation`), APoZ among them.

A result is reused as long as its inputs are the same: the partition and its data, the network (of a user's own: its
source too), the seed, the parameters that the preparation is given, and the files of its folder. The machine is not an
input, so runs that are compared start from the same results.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import ChoosesNetwork, Preparation
from fl_engine.core.errors import ConfigError, ModelError, PartitionError, nearest
from fl_engine.data import partition_files
from fl_engine.data.partition import Partition
from fl_engine.preparation import preparation
from fl_engine.preparation.weights import fitting, given, giver
from fl_engine.rounds.server import PreparingServer
from fl_engine.storage.store import FolderStore, encode, sha256
from flexfleet import config as configs
from flexfleet.files import prepared, terminal
from flexfleet.files.prepared import Index
from flexfleet.files.progress import LOG_S, span, told_while
from flexfleet.pipeline import own_code
from flexfleet.pipeline.partition import site_of
from flexfleet.pipeline.prepare import Resolved, unchanged

log = logging.getLogger("flexfleet")

PROXY_TEST_SHARE = 0.2
SILENT_S = LOG_S
"""Seconds after which a preparation is logged."""


def pretrain(resolved: Resolved, partition: Path, out: Path, known: Path | None = None) -> Path:
    """Write `<name>.json` for each of the algorithm's preparations into `out`, `<name>.safetensors` for the one that
    gives weights, and prepared.json, whose path is returned. Results in `out` or in the folder `known` are reused if
    their inputs are the same.

    Raises:
        IntegrityError: A file is damaged.
        PartitionError: The server has no data to prepare with.
        ConfigError: Two preparations give weights, or the weights do not fit the network.
    """
    names = resolved.algorithm.preparations
    giver(names)
    parts = partition_files.load(partition, resolved.data) if names else None
    wanted = {name: inputs_of(resolved, name, partition) for name in names}
    before = prepared.index(out)
    made = {n: e for n, e in before.items() if e.inputs == wanted.get(n) and prepared.is_there(out, n, e)}
    Index(made=made).write(out / prepared.INDEX)
    for name in before.keys() - made.keys():
        for file in (prepared.file_of(name), prepared.weights_file_of(name)):
            (out / file).unlink(missing_ok=True)
    for name in names:
        if name in made:
            prepared.content(out, name, made[name])
            _taken_over(name, out)
            continue
        files = _from(known, name, wanted[name])
        if files is None:
            assert parts is not None
            files = _made(resolved, name, parts)
        for file, value in files.items():
            FolderStore(out).put(file, value)
        made[name] = prepared.entry_of(wanted[name], name, files)
        Index(made=made).write(out / prepared.INDEX)
    if not names:
        log.info("Skipping pretrain: %s needs no preparation.", resolved.config.algorithm["name"])
    return out / prepared.INDEX


def is_known(resolved: Resolved, partition: Path, known: Path) -> bool:
    """Whether the folder `known` has the results of all preparations of the algorithm. Raises IntegrityError."""
    there = prepared.index(known)
    return all(
        name in there and there[name].inputs == inputs_of(resolved, name, partition)
        for name in resolved.algorithm.preparations
    )


def _from(known: Path | None, name: str, inputs: str) -> dict[str, bytes] | None:
    """The files in `known` of the same inputs."""
    entry = prepared.index(known).get(name) if known is not None else None
    if known is None or entry is None or entry.inputs != inputs:
        return None
    _taken_over(name, known)
    return prepared.content(known, name, entry)


def _taken_over(name: str, folder: Path) -> None:
    log.info("%s is taken from %s, which has the same inputs", name, folder)


def _made(resolved: Resolved, name: str, parts: Partition) -> dict[str, bytes]:
    """The preparation's files."""
    config, kind = resolved.config, preparation(name)
    need_proxy(name, kind, parts)
    device = config.run.devices[0]
    check_device(device)
    prepare_process((device,))
    settings = settings_of(resolved, name, kind)
    site, reference = site_of(resolved, parts), None
    if config.pretrain.reference:
        everything = seeds.rng(config.seed, "reference").permutation(len(resolved.data.train_y))
        cut = round(PROXY_TEST_SHARE * len(everything))
        whole = replace(parts, proxy_train=np.sort(everything[cut:]), proxy_test=np.sort(everything[:cut]))
        reference = PreparingServer(replace(site, partition=whole), device, settings)
    server = PreparingServer(site, device, settings, reference)
    with told_while(lambda seconds: log.info("pretrain: %s, %s so far", name, span(seconds)), SILENT_S):
        made = kind.prepare(resolved.family, server)
    files = {prepared.file_of(name): prepared.encoded(kind, name, made)}
    if not (weights := given({name: made})):
        return files
    try:
        return {prepared.weights_file_of(name): encode(fitting(resolved.family, weights)), **files}
    except ModelError as error:
        raise ConfigError(f"preparation {name!r} gives weights that are not the whole network's: {error}") from error


def need_proxy(name: str, kind: Preparation, parts: Partition) -> None:
    """Raise PartitionError if a preparation needs data and the server has none."""
    if kind.needs_data and not (len(parts.proxy_train) and len(parts.proxy_test)):
        raise PartitionError(
            f"partition.proxy leaves the server no data, which the preparation {name} needs. Raise it, set "
            "partition.server_classes, or choose another algorithm (for flexfl set algorithm.use_apoz=false)"
        )


# ------------------------------------------------------------------------------------------------------ its inputs
def inputs_of(resolved: Resolved, name: str, partition: Path) -> str:
    """Digest of everything that the preparation is computed from. `partition` is the folder of that step."""
    kind, chosen = preparation(name), isinstance(resolved.algorithm, ChoosesNetwork)
    device = resolved.config.run.devices[0].partition(":")[0]
    parts = {
        "preparation": name,
        "code": _code(kind),
        "seed": resolved.config.seed,
        "network": repr(resolved.family),
        **own_code.digests(resolved.config, ("model", "algorithm") if chosen else ("model",)),
        "partition": sha256(FolderStore(partition).get(partition_files.MANIFEST)),
        "settings": settings_of(resolved, name, kind),
        **({} if device == "cpu" else {"device": device}),
    }
    return sha256(json.dumps(parts, sort_keys=True).encode())


def _code(kind: Preparation) -> list[str] | None:
    """Digests of the files in the folder that defines the preparation; None if it is defined in no file."""
    try:
        own = Path(inspect.getfile(type(kind)))
        for place in own.parents:
            if place.suffix == ".whl":  # the user's own code (`run.code`), named by its sha256
                return [place.stem]
        return [sha256(file.read_bytes()) for file in sorted(own.parent.glob("*.py"))]
    except (TypeError, OSError):
        return None


def settings_of(resolved: Resolved, name: str, kind: Preparation) -> dict[str, Any]:
    """The parameters that the preparation is given, the algorithm's with their defaults. Raises ConfigError for an
    unknown one."""
    algorithm: Any = resolved.algorithm
    own = {f"algorithm.{f.name}": f.name for f in fields(algorithm) if f.name != "training"}
    others = {k: v for k, v in configs.flatten(resolved.config).items() if not k.startswith("algorithm.")}
    if unknown := [each for each in kind.settings if each not in own and each not in others]:
        raise ConfigError(
            f"the `settings` of preparation {name} have {unknown[0]!r}, which is not a parameter of "
            f"{resolved.config.algorithm['name']}{nearest(unknown[0], own)}"
        )
    asked = {
        each: to_jsonable_python(getattr(algorithm, own[each]), fallback=repr) if each in own else others[each]
        for each in kind.settings
    }
    return {k: v for k, v in others.items() if k.startswith("pretrain.")} | asked


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "", partition="partition")
    args = terminal.parsed(p, argv)
    with unchanged(args) as resolved:
        written = pretrain(resolved, args.partition, args.out)
    terminal.show(str(written))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)

"""Step 2: the algorithm's preparations, APoZ among them (`fl_engine.preparation`), and what of them is there already.

A result is kept as long as its inputs are the same: the partition and the data that it was cut from, the network (of
one's own: its source too), the seed, the parameters that the preparation is given, and the file that defines it. The
machine is no input: runs that are compared start from the same results, wherever these were computed.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Iterator, Sequence
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
"""Seconds after which a preparation, which may train for long, is told of."""


def pretrain(resolved: Resolved, partition: Path, out: Path, known: Path | None = None) -> Path:
    """Writes `<name>.json` for each of the algorithm's preparations into `out`, `<name>.safetensors` for the one that
    gives weights, and prepared.json. What is there, or in the folder `known`, is taken over where its inputs are the
    same. Returns the path of prepared.json.

    Raises IntegrityError naming a file that is damaged, PartitionError where the server holds no data to prepare with,
    ConfigError where two preparations give weights, or one gives such as do not fit the network.
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
        log.info("pretrain: %s asks for no preparation, nothing to do", resolved.config.algorithm["name"])
    return out / prepared.INDEX


def is_known(resolved: Resolved, partition: Path, known: Path) -> bool:
    """Whether all that the algorithm's preparations would make is in the folder `known`. Raises IntegrityError."""
    there = prepared.index(known)
    return all(
        name in there and there[name].inputs == inputs_of(resolved, name, partition)
        for name in resolved.algorithm.preparations
    )


def _from(known: Path | None, name: str, inputs: str) -> dict[str, bytes] | None:
    """The files that are kept there of the same inputs."""
    entry = prepared.index(known).get(name) if known is not None else None
    if known is None or entry is None or entry.inputs != inputs:
        return None
    _taken_over(name, known)
    return prepared.content(known, name, entry)


def _taken_over(name: str, folder: Path) -> None:
    log.info("%s is taken over from %s: its inputs are the same", name, folder)


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
    """Raises PartitionError if a preparation needs data and the server holds no samples."""
    if kind.needs_data and not (len(parts.proxy_train) and len(parts.proxy_test)):
        raise PartitionError(
            f"the preparation {name} needs data on the server, and partition.proxy leaves it none: raise "
            "partition.proxy, set partition.server_classes, or choose an algorithm that does without it (for flexfl "
            "set algorithm.use_apoz=false)"
        )


# ------------------------------------------------------------------------------------------------------ its inputs
def inputs_of(resolved: Resolved, name: str, partition: Path) -> str:
    """Digest of all that the preparation is computed from. `partition`: what the partition step wrote."""
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
    """Digests of the file that the preparation is written in, then of those beside it that it takes names from; None
    where it is in no file."""
    try:
        own = Path(inspect.getfile(type(kind)))
        for place in own.parents:
            if place.suffix == ".whl":  # of one's own code (`run.code`), named by its sha256
                return [place.stem]
        files = [
            own,
            *sorted({file for file in _files_of_names(type(kind)) if file != own and file.parent == own.parent}),
        ]
        return [sha256(file.read_bytes()) for file in files]
    except (TypeError, OSError):
        return None


def _files_of_names(kind: type[Preparation]) -> Iterator[Path]:
    """Where all that is named in the class's module was written."""
    for value in vars(sys.modules[kind.__module__]).values():
        module = value if inspect.ismodule(value) else inspect.getmodule(value)
        if module is not None and getattr(module, "__file__", None) is not None:
            yield Path(inspect.getfile(module))


def settings_of(resolved: Resolved, name: str, kind: Preparation) -> dict[str, Any]:
    """The parameters that the preparation is given, the algorithm's with their defaults. Raises ConfigError for one
    that there is not."""
    algorithm: Any = resolved.algorithm
    own = {f"algorithm.{f.name}": f.name for f in fields(algorithm) if f.name != "training"}
    others = {k: v for k, v in configs.flatten(resolved.config).items() if not k.startswith("algorithm.")}
    if unknown := [each for each in kind.settings if each not in own and each not in others]:
        raise ConfigError(
            f"the preparation {name} depends on {unknown[0]!r}, which is no parameter of "
            f"{resolved.config.algorithm['name']}{nearest(unknown[0], own)}: correct its `settings`"
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

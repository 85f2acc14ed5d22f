"""Step 2: run the algorithm's preparations (`fl_engine.preparation`), such as APoZ.

The result of a preparation is reused until one of its inputs changes. The inputs are the seed, the partition with its
data, the network, and the preparation's parameters and source files. The source code of a user's own network is also an
input. The machine is not an input, so compared runs on different machines start from the same results.
"""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import ChoosesNetwork, Preparation
from fl_engine.core.errors import ConfigError, IntegrityError, ModelError, Named, PartitionError, nearest
from fl_engine.core.fields import Moves
from fl_engine.data.partition import MANIFEST, Partition
from fl_engine.preparation import preparation
from fl_engine.preparation.weights import fitting, given, giver
from fl_engine.rounds.server import PreparingServer
from fl_engine.storage.store import FolderStore, encode, sha256
from flexfleet import config as configs
from flexfleet.files import prepared
from flexfleet.files.artifacts import Artifact
from flexfleet.files.prepared import Index
from flexfleet.files.progress import LOG_S, called_while_waiting, span
from flexfleet.files.run_folder import changes
from flexfleet.pipeline import own_code
from flexfleet.pipeline import partition as partition_step
from flexfleet.pipeline.partition import site_before_pool
from flexfleet.pipeline.prepare import Resolved

log = logging.getLogger("flexfleet")

PROXY_TEST_SHARE = 0.2


def pretrain(resolved: Resolved, partition: Path, out: Path) -> Path:
    """Run the algorithm's preparations, and write `<name>.json` for each into `out`. If a preparation returns weights,
    also write `<name>.safetensors`. Return the path of prepared.json. Results with unchanged inputs are reused.

    Raises:
        IntegrityError: prepared.json is damaged.
        PartitionError: A preparation needs data on the server, but the server does not have data.
        ConfigError: More than one preparation returns weights, or the weights do not fit the network.
    """
    names = resolved.algorithm.preparations
    giver(names)
    parts = Partition.load(partition, resolved.data) if names else None
    wanted = {name: inputs_of(resolved, name, partition) for name in names}
    before = prepared.index(out)
    made = {n: e for n, e in before.items() if e.inputs == wanted.get(n) and prepared.is_there(out, n, e)}
    Index(made=made).write(out / prepared.INDEX)
    for name in before.keys() - made.keys():
        for file in (prepared.file_of(name), prepared.file_of(name, "safetensors")):
            (out / file).unlink(missing_ok=True)
    for name in names:
        if name in made:
            log.info("reusing %s from %s, because the inputs are the same", name, out)
        else:
            assert parts is not None
            files = _computed(resolved, name, parts)
            for file, value in files.items():
                FolderStore(out).put(file, value)
            made[name] = prepared.entry_of(wanted[name], name, files)
            Index(made=made).write(out / prepared.INDEX)
    if not names:
        log.info("Skipping pretrain: %s needs no preparation.", resolved.config.algorithm["name"])
    return out / prepared.INDEX


def _computed(resolved: Resolved, name: str, parts: Partition) -> dict[str, bytes]:
    config, kind = resolved.config, preparation(name)
    need_proxy(name, kind, parts)
    device = config.run.devices[0]
    check_device(device)
    prepare_process((device,))
    settings = Named(settings_of(resolved, name, kind), f"must be listed in the `settings` of preparation {name}")
    site, reference = site_before_pool(resolved, parts), None
    if config.pretrain.reference:
        everything = seeds.rng(config.seed, "reference").permutation(len(resolved.data.train_y))
        cut = round(PROXY_TEST_SHARE * len(everything))
        whole = replace(parts, proxy_train=np.sort(everything[cut:]), proxy_test=np.sort(everything[:cut]))
        reference = PreparingServer(replace(site, partition=whole), device, settings)
    server = PreparingServer(site, device, settings, reference)
    with called_while_waiting(lambda seconds: log.info("pretrain: %s, running for %s", name, span(seconds)), LOG_S):
        result = kind.prepare(resolved.family, server)
    files = {prepared.file_of(name): prepared.encoded(kind, name, result)}
    if not (weights := given({name: result})):
        return files
    try:
        return {prepared.file_of(name, "safetensors"): encode(fitting(resolved.family, weights)), **files}
    except ModelError as error:
        raise ConfigError(f"preparation {name!r} returned weights that do not fit the network: {error}") from error


def need_proxy(name: str, kind: Preparation, parts: Partition) -> None:
    """Raise PartitionError if a preparation needs data on the server and the server has no data."""
    if kind.needs_data and not (len(parts.proxy_train) and len(parts.proxy_test)):
        raise PartitionError.at(
            f"partition.proxy is too small: preparation {name} requires data on the server. Increase the fraction, set "
            "partition.server_classes, or choose another algorithm (for flexfl set algorithm.use_apoz=false)"
        )


def inputs_of(resolved: Resolved, name: str, partition: Path) -> str:
    """Return a digest of all inputs of the preparation. `partition` is the output folder of the `partition` step."""
    kind, chosen = preparation(name), isinstance(resolved.algorithm, ChoosesNetwork)
    device = resolved.config.run.devices[0].partition(":")[0]
    parts = {
        "preparation": name,
        "code": _code(kind),
        "seed": resolved.config.seed,
        "network": repr(resolved.family),
        **own_code.digests(resolved.config, ("model", "algorithm") if chosen else ("model",)),
        "partition": sha256(FolderStore(partition).get(MANIFEST)),
        "settings": settings_of(resolved, name, kind),
        **({} if device == "cpu" else {"device": device}),
    }
    return sha256(json.dumps(parts, sort_keys=True).encode())


def _code(kind: Preparation) -> list[str] | None:
    """Return the digests of the source files in the preparation's folder; None if no file defines the preparation."""
    try:
        own = Path(inspect.getfile(type(kind)))
        for place in own.parents:
            if place.suffix == ".whl":  # the file name of the user's wheel is its sha256
                return [place.stem]
        return [sha256(file.read_bytes()) for file in sorted(own.parent.glob("*.py"))]
    except (TypeError, OSError):
        return None


def settings_of(resolved: Resolved, name: str, kind: Preparation) -> dict[str, Any]:
    """Return the values of the preparation's parameters by dotted name. Raises ConfigError for an unknown parameter."""
    algorithm: Any = resolved.algorithm
    own = {f"algorithm.{f.name}": f.name for f in fields(algorithm) if f.name != "training"}
    others = {k: v for k, v in configs.flatten(resolved.config).items() if not k.startswith("algorithm.")}
    if unknown := [each for each in kind.settings if each not in own and each not in others]:
        raise ConfigError(
            f"preparation {name}: `settings` must list parameters of {resolved.config.algorithm['name']}, got "
            f"{unknown[0]!r}{nearest(unknown[0], own)}"
        )
    named = {
        each: to_jsonable_python(getattr(algorithm, own[each]), fallback=repr) if each in own else others[each]
        for each in kind.settings
    }
    return {k: v for k, v in others.items() if k.startswith("pretrain.")} | named


SECTIONS = ("dataset.", "partition.", "noise.", "model.", "pretrain.", "seed")
"""Prefixes of the parameters that determine the partition and, with the algorithm's parameters, the preparations."""
HELD_OUT = ("evaluate.on", "evaluate.held_out")
"""Parameters that also determine the wrong labels if noise.labels is set."""
SHARED = "shared.json"


class Shared(Artifact):
    """Contents of shared.json, which records the settings of a shared folder. The file is written last."""

    settings: dict[str, Any]


def share(resolved: Resolved, out: Path) -> Path:
    """Write partition/, pretrain/ and shared.json into `out`. All runs with the same seed copy these results.
    `resolved` is the configuration of one of these runs, if possible of a run that needs preparations."""
    (out / SHARED).unlink(missing_ok=True)
    partition_step.partition(resolved, out / "partition")
    pretrain(resolved, out / "partition", out / "pretrain")
    return Shared(settings=shared_settings(configs.flatten(resolved.config))).write(out / SHARED)


def can_adopt(resolved: Resolved, shared: Path) -> bool:
    """Return whether the folder already contains the results that `share` would compute for this configuration."""
    try:
        if Shared.read(shared / SHARED).settings != shared_settings(configs.flatten(resolved.config)):
            return False
        found = prepared.index(shared / "pretrain")
    except IntegrityError:
        return False
    return all(
        name in found and found[name].inputs == inputs_of(resolved, name, shared / "partition")
        for name in resolved.algorithm.preparations
    )


def adopt(resolved: Resolved, shared: Path, out: Path) -> None:
    """Copy the partition and the results of the preparations from `shared` into the run folder `out`. Results whose
    inputs differ are computed again. Raises ConfigError if `shared` was written with other settings."""
    known, wanted = Shared.read(shared / SHARED).settings, shared_settings(configs.flatten(resolved.config))
    if changed := changes(known, wanted, lambda _: True):
        raise ConfigError(f"{shared} was created with other settings than this run ({changed}). Run `share` again")
    shutil.copytree(shared / "partition", out / "partition", dirs_exist_ok=True)
    shutil.copytree(shared / "pretrain", out / "pretrain", dirs_exist_ok=True)
    pretrain(resolved, out / "partition", out / "pretrain")


def shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters on which the partition and the preparations depend, except the algorithm's parameters."""
    holds_out = config.get("noise.labels") and config.get("evaluate.on") == "clients"
    held_out = HELD_OUT if holds_out else ()
    return {
        key: value
        for key, value in config.items()
        if key in held_out or (key.startswith(SECTIONS) and configs.moves(key) is Moves.RESULT)
    }

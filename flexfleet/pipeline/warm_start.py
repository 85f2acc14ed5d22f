"""Load the initial weights of the whole network for the first round.

`model.init` names a safetensors file, the folder of a run, or a model in MLflow's registry. If the network is the
user's module and has weights, training starts from the weights of the module. The names, types and shapes of the
weights must match the network. Pickle files are not loaded, because unpickling can execute arbitrary code.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch

from fl_engine.core.contracts import GivesWeights, ModelFamily
from fl_engine.core.errors import ConfigError, DataError, IntegrityError, ModelError, masked
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import FULL, Params
from fl_engine.models.build import INIT
from fl_engine.models.export import ABOUT, About
from fl_engine.preparation.weights import fitting, mismatch, names_of
from fl_engine.storage.store import decode, sha256
from flexfleet.config import Config
from flexfleet.files.artifacts import History
from flexfleet.tracking.server import Client, address

log = logging.getLogger("flexfleet")

MODEL, REGISTERED = "model.safetensors", "models:/"
RESULT, COUNTER = "network.", "num_batches_tracked"
"""Prefix of all names in `Result.model().state_dict()`, and suffix of the names of batch-norm counters."""


def start(config: Config, family: ModelFamily) -> Params | None:
    """Return the weights that `model.init` names. If `model.init` is not set, return the weights of the user's module.
    The weights are in the order of the network's parameters. Return None if there are no initial weights.

    Raises:
        DataError: The weights are not available.
        ConfigError: The weights belong to another network, or the file is not a safetensors file.
        IntegrityError: A run's weights are damaged.
        ModelError: The weights of a module are not finite.
    """
    init = config.model.get(INIT)
    if init is None:
        own = family.weights() if isinstance(family, GivesWeights) else {}
        return fitting(family, own) if own else None
    found, where = _read(config, str(init), names_of(family))
    found = _that_are_sent(family, found, where)
    if wrong := mismatch(family, found):
        raise ConfigError(
            f"model.{INIT}: {where} does not fit {config.model['name']} with {config.algorithm['name']}: {wrong}. Use "
            "weights of the same network with the same options"
        )
    try:
        weights = fitting(family, found)
    except ModelError as error:
        raise ConfigError(f"model.{INIT}: {where}: {error}") from error
    log.info("training starts from the weights of %s", where)
    return weights


def _that_are_sent(family: ModelFamily, found: Params, where: str) -> Params:
    """Return the entries of a `state_dict` that are part of the global model. Remove batch-norm counters, constants of
    the network, and the prefix and statistics that `Result.model()` adds. Raises ConfigError if the constants in the
    `state_dict` differ from the network's constants."""
    names = names_of(family)
    if not found.keys() & set(names):
        found = _known({name.removeprefix(RESULT): tensor for name, tensor in found.items()}, names)
    constants = {name: buffer for name, buffer in family.module().named_buffers() if name not in names}
    for name in found.keys() & constants.keys():
        if not torch.equal(found[name].to(constants[name].dtype), constants[name]):
            raise ConfigError(
                f"model.{INIT}: the constant {name} in {where} differs from the network's constant. Build the network "
                "with the same constants"
            )
    left_out = {*constants, *(name for name in found if name.endswith(COUNTER) and name not in names)}
    return {name: tensor for name, tensor in found.items() if name not in left_out}


def _read(config: Config, init: str, names: Collection[str]) -> tuple[Params, str]:
    """Return the weights, and a description of their source for messages. `names`: names of the network's weights."""
    if init.startswith(REGISTERED):
        return _registered(config, init, names)
    named = Path(init)
    tried = [named] if named.is_absolute() else [named, Path(config.run.store) / named]
    for path in tried:
        file = path / MODEL if path.is_dir() else path
        try:
            if file.is_file():
                return _weights(file, names, str(path)), str(path)
        except OSError as error:
            raise DataError(f"model.{INIT} = {init} cannot be read: {error.strerror}") from error
    raise DataError(
        f"model.{INIT} = {masked(init)} has no weights (tried {' and '.join(map(str, tried))}). Choose a "
        f"safetensors file, the folder of a run (with {MODEL}), or {REGISTERED}NAME@ALIAS"
    )


def _weights(path: Path, names: Collection[str], where: str) -> Params:
    """Return the weights in a file. Error messages contain `where` as the name of the file. Omit batch-norm statistics
    from the export of a level, and entries that are not part of the global model."""
    value, folder, history = path.read_bytes(), path.parent, path.with_name("history.json")
    if path.name == MODEL and history.is_file() and sha256(value) != History.read(history).model_sha256:
        raise IntegrityError(f"{path} is damaged, because its sha256 differs from the sha256 in history.json")
    try:
        found = decode(value, str(path))
    except IntegrityError as error:
        raise ConfigError(
            f"model.{INIT}: {path} must be a safetensors file. Convert a file that you trust with "
            "safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')"
        ) from error
    if (folder / ABOUT).is_file():
        if not _is_whole(folder):
            raise ConfigError(f"model.{INIT}: {where} contains only a smaller level. Choose the largest level")
        return _known(found, names)
    return {name: tensor for name, tensor in found.items() if "/" not in name}


def _known(found: Params, names: Collection[str]) -> Params:
    """Return the weights, but omit batch-norm statistics that the network does not have."""
    return {name: tensor for name, tensor in found.items() if name in names or not is_statistic(name)}


def _registered(config: Config, init: str, names: Collection[str]) -> tuple[Params, str]:
    uri = config.tracking.mlflow
    if uri is None:
        raise ConfigError(f"model.{INIT} = {init} requires MLflow, but tracking.mlflow is null. Set tracking.mlflow")
    Client(uri)
    from mlflow import artifacts
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as scratch:
        try:
            got = Path(artifacts.download_artifacts(init, dst_path=scratch, tracking_uri=address(uri)))
        except (MlflowException, OSError) as error:
            raise DataError(f"model.{INIT} = {init} is not available: {masked(str(error))[:300]}") from error
        files = [path for path in sorted(got.rglob("*.safetensors")) if path.is_file()]
        if len(files) > 1:
            files = [path for path in files if _is_whole(path.parent)]
        if len(files) != 1:
            raise DataError(f"model.{INIT} = {init} has {len(files)} safetensors files of whole networks, expected one")
        return _weights(files[0], names, init), init


def _is_whole(folder: Path) -> bool:
    """Return whether an exported level is the whole network."""
    try:
        return About.model_validate_json((folder / ABOUT).read_bytes()).spec == FULL.to_json()
    except (OSError, ValueError):
        return False

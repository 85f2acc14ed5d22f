"""The weights of the whole network with which the first round starts, unless they are fresh ones.

`model.init` names a safetensors file, the folder of a run, or a model in MLflow's registry. A network that is a module
with weights comes with its own. Names, types and shapes must fit the network. Nothing is unpickled, because a pickle
can run any code.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch

from fl_engine.core.contracts import GivesWeights, ModelFamily
from fl_engine.core.errors import BadInput, ConfigError, DataError, IntegrityError, ModelError, masked
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import FULL, Params
from fl_engine.models.build import INIT
from fl_engine.models.export import ABOUT, About
from fl_engine.preparation.weights import fitting, mismatch, names_of
from fl_engine.storage.store import decode, sha256
from flexfleet.config import Config
from flexfleet.files.artifacts import BareHistory
from flexfleet.tracking.server import address, client_of

log = logging.getLogger("flexfleet")

MODEL, REGISTERED = "model.safetensors", "models:/"
RESULT, COUNTER = "network.", "num_batches_tracked"
"""Prefix of the names in `Result.model().state_dict()`; end of the names of batch norm's counters."""


def start(config: Config, family: ModelFamily) -> Params | None:
    """Return the weights that `model.init` names, else those that the network comes with, in the network's order; None
    if there are none.

    Raises:
        DataError: The weights are not available.
        ConfigError: They are not of this network, or not safetensors.
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
            f"model.{INIT}: {where} does not fit {config.model['name']} with {config.algorithm['name']}: {wrong}. Name "
            "weights of the same network with the same options"
        )
    try:
        weights = fitting(family, found)
    except ModelError as error:
        raise ConfigError(f"model.{INIT}: {where}: {error}") from error
    log.info("the rounds start from %s", where)
    return weights


def _that_are_sent(family: ModelFamily, found: Params, where: str) -> Params:
    """Return the entries of a `state_dict` that clients are sent. Leaves out the prefix of `Result.model()`, the
    statistics that it adds, batch norm's counters and the network's constants. Raises ConfigError if the network has
    other constants."""
    names = names_of(family)
    if not found.keys() & set(names):
        found = _known({name.removeprefix(RESULT): tensor for name, tensor in found.items()}, names)
    constants = {name: buffer for name, buffer in family.module().named_buffers() if name not in names}
    for name in found.keys() & constants.keys():
        if not torch.equal(found[name].to(constants[name].dtype), constants[name]):
            raise ConfigError(
                f"model.{INIT}: {where} has other values of the constant {name}. Build the network with these values"
            )
    left_out = {*constants, *(name for name in found if name.endswith(COUNTER) and name not in names)}
    return {name: tensor for name, tensor in found.items() if name not in left_out}


def check_same(before: str | None, now: str | None, config: Config, out: Path) -> None:
    """Raise ConfigError if a run is resumed with other weights than it started from. Both are sha256 sums, None for
    fresh weights."""
    if before == now:
        return
    init = config.model.get(INIT)
    what = f"the network {config.model['name']}" if init is None else f"model.{INIT} = {init}"
    said, here = (f"weights of sha256 {sha[:12]}" if sha else "fresh weights" for sha in (before, now))
    raise ConfigError(
        f"{what} gives {here} now, but {out} was started from {said}. Restore them, or choose another --run-id"
    )


# -------------------------------------------------------------------------------------------------- where they are
def _read(config: Config, init: str, names: Collection[str]) -> tuple[Params, str]:
    """Return the weights and what to call them. `names` are those of the network's weights."""
    if init.startswith(REGISTERED):
        return _registered(config, init, names)
    named = Path(init)
    tried = [named] if named.is_absolute() else [named, Path(config.run.store) / named]
    for path in tried:
        try:
            if path.is_file():
                return _decoded(path.read_bytes(), path), str(path)
            if path.is_dir():
                return _folder(path, names), str(path)
        except OSError as error:
            raise DataError(f"model.{INIT} = {init} cannot be read: {error.strerror}") from error
    raise DataError(
        f"model.{INIT} = {masked(init)} does not exist (tried {' and '.join(map(str, tried))}). Name a safetensors "
        f"file, the folder of a run, or {REGISTERED}NAME@ALIAS"
    )


def _decoded(value: bytes, path: Path) -> Params:
    try:
        return decode(value, str(path))
    except IntegrityError as error:
        raise ConfigError(
            f"model.{INIT}: {path} is not a safetensors file. If you trust it, convert it: "
            "safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')"
        ) from error


def _folder(folder: Path, names: Collection[str]) -> Params:
    """The global model in the folder of a run, or the weights in the folder of an exported level."""
    path = folder / MODEL
    if not path.is_file():
        raise DataError(f"model.{INIT} = {folder} has no {MODEL}")
    value = path.read_bytes()
    if (folder / ABOUT).is_file():
        return _exported(folder, _decoded(value, path), names)
    if (folder / "history.json").is_file():
        expected = BareHistory.read(folder / "history.json").model_sha256
        if (actual := sha256(value)) != expected:
            raise IntegrityError(f"{path} is damaged: its sha256 is {actual[:12]}, expected {expected[:12]}")
    return {name: tensor for name, tensor in _decoded(value, path).items() if "/" not in name}


def _exported(folder: Path, found: Params, names: Collection[str]) -> Params:
    """Without the statistics of batch norm that the export has added."""
    if not _is_whole(folder):
        raise ConfigError(f"model.{INIT}: {folder} is a level with a part of the network. Name the largest level")
    return _known(found, names)


def _known(found: Params, names: Collection[str]) -> Params:
    """Without batch-norm statistics that the network does not have."""
    return {name: tensor for name, tensor in found.items() if name in names or not is_statistic(name)}


def _registered(config: Config, init: str, names: Collection[str]) -> tuple[Params, str]:
    uri = config.tracking.mlflow
    if uri is None:
        raise ConfigError(f"model.{INIT} = {init} needs MLflow, but tracking.mlflow is null")
    client_of(uri)
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
        try:
            found = _decoded(files[0].read_bytes(), files[0])
            if (files[0].parent / ABOUT).is_file():
                found = _exported(files[0].parent, found, names)
        except BadInput as error:
            raise type(error)(str(error).replace(str(got), init)) from error
        return found, init


def _is_whole(folder: Path) -> bool:
    """Whether an exported level is the whole network."""
    try:
        return About.model_validate_json((folder / ABOUT).read_bytes()).spec == FULL.to_json()
    except (OSError, ValueError):
        return False

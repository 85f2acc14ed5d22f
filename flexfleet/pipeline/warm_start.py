"""The weights of the whole network with which the first round starts, where they are not fresh ones.

`model.init` names a safetensors file, the folder of a run, or a model in MLflow's registry; a network that is a module
with weights comes with them. They have to fit the network by names, types and shapes. Nothing is unpickled: a pickle
can run any code when it is read.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from fl_engine.core.contracts import GivesWeights, ModelFamily
from fl_engine.core.errors import (
    BadInput,
    ConfigError,
    DataError,
    IntegrityError,
    ModelError,
    masked,
)
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
PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin", ".joblib")
RESULT, COUNTER = "network.", "num_batches_tracked"
"""The prefix of the names in `Result.model().state_dict()`; the end of the name of batch norm's counters."""
MAGIC = (b"PK\x03\x04", b"\x80")
"""How torch's files and bare pickles begin."""


def start(config: Config, family: ModelFamily) -> Params | None:
    """The weights of the whole network, in its order, that `model.init` names, else those that the network comes with;
    None: there are none. Raises DataError where they are not to be had, ConfigError where they are not this network's
    or no safetensors, IntegrityError where a run's are damaged, ModelError where a module's are not finite."""
    init = config.model.get(INIT)
    if init is None:
        own = family.weights() if isinstance(family, GivesWeights) else {}
        return fitting(family, own) if own else None
    found, where = _read(config, str(init), names_of(family))
    found = _that_are_sent(family, found, where)
    if wrong := mismatch(family, found):
        raise ConfigError(
            f"model.{INIT}: {where} is not of this network ({config.model['name']}, with {config.algorithm['name']}): "
            f"{wrong}. Name weights of the same network with the same options"
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
                f"model.{INIT}: {where} has other values of {name}, which the network does not train: build the "
                "network with the values of the file"
            )
    left_out = {*constants, *(name for name in found if name.endswith(COUNTER) and name not in names)}
    return {name: tensor for name, tensor in found.items() if name not in left_out}


def check_same(before: str | None, now: str | None, config: Config, out: Path) -> None:
    """Raises ConfigError unless a run goes on from the weights that it was started from. By their sha256; None: fresh
    ones."""
    if before == now:
        return
    init = config.model.get(INIT)
    what = f"the network {config.model['name']}" if init is None else f"model.{INIT} = {init}"
    said, here = (f"weights of sha256 {sha[:12]}" if sha else "fresh weights" for sha in (before, now))
    raise ConfigError(
        f"{out} was started from {said}, and {what} gives {here} now: restore them, or choose another --run-id"
    )


# -------------------------------------------------------------------------------------------------- where they are
def _read(config: Config, init: str, names: Collection[str]) -> tuple[Params, str]:
    """(the weights, what to call them). `names`: of the network's weights."""
    if init.startswith(REGISTERED):
        return _registered(config, init, names)
    named = Path(init)
    tried = [named] if named.is_absolute() else [named, Path(config.run.store) / named]
    for path in tried:
        try:
            if path.is_file():
                return _file(path), str(path)
            if path.is_dir():
                return _folder(path, names), str(path)
        except OSError as error:
            raise DataError(f"model.{INIT} = {init} cannot be read: {error.strerror}") from error
    raise DataError(
        f"model.{INIT} = {masked(init)} is not there (looked for {' and '.join(map(str, tried))}): name a safetensors "
        f"file, the folder of a run, or {REGISTERED}NAME@ALIAS"
    )


def _file(path: Path) -> Params:
    return _decoded(path.read_bytes(), path)


def _decoded(value: bytes, path: Path) -> Params:
    try:
        return decode(value, str(path))
    except IntegrityError as error:
        if path.suffix in PICKLES or value.startswith(MAGIC):
            raise ConfigError(
                f"model.{INIT}: {path} is a pickle, which may run any code when it is read: it is not read here. Where "
                "you trust it, write its weights as safetensors: safetensors.torch.save_file(network.state_dict(), "
                "'weights.safetensors')"
            ) from error
        raise ConfigError(f"model.{INIT}: {error}; a safetensors file is expected") from error


def _folder(folder: Path, names: Collection[str]) -> Params:
    """The weights in the folder of a run, of its global model where levels have weights of their own; or in that of an
    exported level."""
    path = _only(folder, [folder / MODEL] if (folder / MODEL).is_file() else [])
    value = path.read_bytes()
    if (folder / "history.json").is_file() and not (folder / ABOUT).is_file():
        expected = BareHistory.read(folder / "history.json").model_sha256
        if (actual := sha256(value)) != expected:
            raise IntegrityError(f"{path} is damaged: its sha256 is {actual[:12]}, history.json says {expected[:12]}")
    found = _decoded(value, path)
    if (folder / ABOUT).is_file():
        return _exported(folder, found, names)
    return {name: tensor for name, tensor in found.items() if "/" not in name}


def _exported(folder: Path, found: Params, names: Collection[str]) -> Params:
    """Without the statistics of batch norm that the export has added to a network that keeps none."""
    try:
        about = About.model_validate_json((folder / ABOUT).read_bytes())
    except ValueError as error:
        raise ConfigError(f"model.{INIT}: {folder / ABOUT} does not say what {MODEL} is") from error
    if about.spec != FULL.to_json():
        raise ConfigError(
            f"model.{INIT}: {folder} holds the level {about.level}, a part of the network, and a run starts from "
            "all of it: name the largest level"
        )
    return _known(found, names)


def _known(found: Params, names: Collection[str]) -> Params:
    """Without batch-norm statistics that the network does not keep."""
    return {name: tensor for name, tensor in found.items() if name in names or not is_statistic(name)}


def _registered(config: Config, init: str, names: Collection[str]) -> tuple[Params, str]:
    uri = config.tracking.mlflow
    if uri is None:
        raise ConfigError(f"model.{INIT} = {init} is looked up in MLflow, and tracking.mlflow is null")
    client_of(uri)
    from mlflow import artifacts
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as scratch:
        try:
            got = Path(artifacts.download_artifacts(init, dst_path=scratch, tracking_uri=address(uri)))
        except (MlflowException, OSError) as error:
            raise DataError(f"model.{INIT} = {init} is not to be had: {masked(str(error))[:300]}") from error
        files = sorted(path for path in got.rglob("*.safetensors") if path.is_file())
        if len(files) > 1:
            files = [path for path in files if _is_whole(path.parent)]
        path = _only(got, files, init)
        try:
            found = _file(path)
            if (path.parent / ABOUT).is_file():
                found = _exported(path.parent, found, names)
        except BadInput as error:
            raise type(error)(str(error).replace(str(got), init)) from error
        return found, init


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / ABOUT).read_bytes())["spec"] == FULL.to_json())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _only(folder: Path, files: Sequence[Path], called: str | None = None) -> Path:
    """Raises DataError unless it is one file."""
    if len(files) == 1:
        return files[0]
    what = folder if called is None else called
    if files:
        raise DataError(
            f"model.{INIT} = {what} holds {len(files)} safetensors files of whole networks: name one of them"
        )
    others = ", ".join(_pickled(folder)[:3])
    said = f"; {others} would have to be unpickled, which is refused" if others else ""
    raise DataError(f"model.{INIT} = {what} holds no {MODEL if called is None else 'safetensors file'}{said}")


def _pickled(folder: Path) -> list[str]:
    found: Iterable[Path] = folder.rglob("*")
    return sorted(path.name for path in found if path.suffix in PICKLES)

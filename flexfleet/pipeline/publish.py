"""Export all reported levels of a finished run, and register the exported levels in MLflow.

New versions of a registered model get the alias `candidate`. The command `flexfleet regress` sets the alias `champion`.

The model `<name>` predicts with any level, and `<name>-<level>` with one level. Both are MLflow models: load them with
mlflow.pyfunc.load_model("models:/<name>@candidate"). The folder of `<name>-<level>` also contains the files of the
exported level, which fl_engine.models.export.load reads.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fl_engine
from fl_engine.backends.in_process import prepare_process
from fl_engine.core.errors import ConfigError, Refused
from fl_engine.core.samples import Data
from fl_engine.core.task import has
from fl_engine.core.types import PoolModel
from fl_engine.data.partition import Partition
from fl_engine.models import export as exports
from fl_engine.models import onnx_precisions
from fl_engine.models.export import About
from fl_engine.models.onnx_precisions import OnnxPrecision
from flexfleet.config import Config, codecs
from flexfleet.files.artifacts import EvaluationFile, History, PoolFile, read_params
from flexfleet.files.measure import Measure
from flexfleet.files.run_folder import check_manifest
from flexfleet.pipeline.prepare import Resolved
from flexfleet.reports import precisions
from flexfleet.tracking.record import experiment
from flexfleet.tracking.server import Client, code_of
from flexfleet.tracking.trackers import log_outcome

CANDIDATE, CHAMPION = "candidate", "champion"
MODEL = "model_sha256"
"""Name of the tag in which a model version stores the sha256 of the global model."""
SERVING = Path(__file__).with_name("serving.py")
NEEDED = ("torch", "numpy", "safetensors", "pydantic", "pyyaml")
"""Packages that a registered model requires. fl_engine is missing here, because the model contains a copy of it."""

log = logging.getLogger("flexfleet")


def publish(resolved: Resolved, out: Path, mlflow_run_id: str | None, to: Path) -> list[About]:
    """Export the reported levels of the run in `out` into the folder `to`. If the run is tracked, also register these
    levels. A repeated call does not create new versions."""
    config = resolved.config
    data, levels = export(resolved, out, to)
    if mlflow_run_id is not None and config.tracking.mlflow is not None:
        model = History.read(out / "history.json").model_sha256
        client = Client(config.tracking.mlflow, config.run.patience_s)
        register(client, mlflow_run_id, name_of(config), data, to, levels, model)
    return levels


def export(resolved: Resolved, out: Path, to: Path) -> tuple[Data, list[About]]:
    """Export each reported level into a subfolder of `to`, in order of increasing size."""
    check_manifest(out)
    config, data, family = resolved.config, resolved.data, resolved.family
    prepare_process(("cpu",))
    history = History.read(out / "history.json")
    params = read_params(out / "model.safetensors", history.model_sha256)
    parts = Partition.load(out / "partition", data)
    proxy = torch.from_numpy(np.sort(np.concatenate([parts.proxy_train, parts.proxy_test])))
    scores = EvaluationFile.read(out / "evaluation.json").levels
    shutil.rmtree(to, ignore_errors=True)
    levels = []
    for member in PoolFile.read(out / "pool" / "pool.json").pool():
        if member.reported:
            folder, trained = to / member.name, scores[member.name].value
            name = config.model["name"]
            about, network = exports.export(name, family, params, member, data, proxy, trained, folder)
            if config.publish.onnx:
                exports.to_onnx(network, data, folder / exports.ONNX)
            log.info("exported %s: %s", member.name, described(about))
            if config.publish.measured:
                wanted, sha = precisions_of(config, member), history.model_sha256
                found = onnx_precisions.measure(folder, member.name, wanted, network, data, sha)
                for line in precisions.refusals([found]):
                    log.warning("%s", line)
            levels.append(about)
    return data, levels


def precisions_of(config: Config, member: PoolModel) -> tuple[OnnxPrecision, ...]:
    """Return the precisions in which a level is exported as ONNX. With `auto`, the precision depends on the codec with
    which the level is sent to clients."""
    if config.publish.precision != "auto":
        return tuple(dict.fromkeys(config.publish.precision))
    return (onnx_precisions.precision_of((member.codecs or codecs(config)).down),)


def described(about: About) -> str:
    """Return a message that compares a level's main metric after the export with its value in the rounds."""
    trained, exported = (Measure(about.metric).with_unit(v) for v in (about.accuracy_trained, about.accuracy_exported))
    how = "with the proxy's statistics" if about.proxy_statistics else "as exported"
    return f"{exported} {how}, {trained} in the rounds"


def name_of(config: Config) -> str:
    """Return the name of the registered models."""
    return clean(config.publish.name or f"{experiment(config)}-{config.algorithm['name']}")


def clean(name: str) -> str:
    """Replace the characters that MLflow does not allow in names of models."""
    return re.sub(r"[^\w.-]+", "-", name)


def register(
    client: Client, run_id: str, name: str, data: Data, folder: Path, levels: Sequence[About], model: str
) -> None:
    """Register the exported levels. The path of the artifacts contains `model`, the sha256 of the global model.
    Therefore, a run that continues with more rounds creates new versions. Raises ConfigError if MLflow rejects the
    name, and EnvironmentFailure if MLflow does not respond."""
    found = {about.level: onnx_precisions.read(folder / about.level) for about in levels}
    values = {f"exported/{about.level}": about.accuracy_exported for about in levels}
    for measured in filter(None, found.values()):
        values |= precisions.metrics(measured)
    log_outcome(client, run_id, values, {}, [])
    at = f"published/{model[:12]}"
    with tempfile.TemporaryDirectory() as scratch:
        code = _code(levels[-1].model, Path(scratch) / "code")
        artifacts = client.get_run(run_id).info.artifact_uri
        for about in levels:
            saved = _save(data, folder / about.level, code, Path(scratch) / about.level)
            client.log_artifacts(run_id, str(saved), f"{at}/levels/{about.level}")
            card = described(about)
            if (precise := found[about.level]) is not None:
                card += f"\n\n```\n{precisions.table([precise])}\n```"
            source = f"{artifacts}/{at}/levels/{about.level}"
            _version(client, f"{name}-{about.level}", source, run_id, model, card)
        saved = _save(data, folder, code, Path(scratch) / "model", levels[-1].level)
        client.log_artifacts(run_id, str(saved), f"{at}/model")
        known = ", ".join(about.level for about in levels)
        card = f'Predicts with any level: params={{"level": ...}} of {known}.'
        _version(client, name, f"{artifacts}/{at}/model", run_id, model, card)


def _version(client: Any, name: str, source: str, run_id: str, model: str, about: str) -> None:
    """Create a version of a registered model unless a killed call has created it, and set its alias `candidate`."""
    quoted = f'"{name}"' if "'" in name else f"'{name}'"
    known = client.search_model_versions(f"name = {quoted}")
    version = next((v for v in known if v.run_id == run_id and v.tags.get(MODEL) == model), None)
    if version is None:
        try:
            client.create_registered_model(name)
        except Refused as error:
            if code_of(error) != "RESOURCE_ALREADY_EXISTS":
                raise ConfigError.at(f"publish.name: MLflow refuses the name {name!r}: {error}") from error
        version = client.create_model_version(name, source, run_id, tags={MODEL: model}, description=about)
    _give(client, version, CANDIDATE)


def _give(client: Any, version: Any, alias: str) -> None:
    """Set the alias of a version, unless a newer version has the alias. The alias is set only once, so users can move
    it."""
    given, held = f"flexfleet.{alias}", client.get_registered_model(version.name).aliases.get(alias)
    if given in version.tags:
        return
    if held is None or int(held) < int(version.version):
        client.set_registered_model_alias(version.name, alias, version.version)
    client.set_model_version_tag(version.name, version.version, given, "given")


def _save(data: Data, levels: Path, code: Sequence[str], out: Path, default: str | None = None) -> Path:
    """Write an MLflow model into the folder `out`, and return this folder. `levels` is the folder of one exported
    level. If `default` is a level's name, `levels` contains a folder for each level."""
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import FLAVOR_NAME, save_model
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    positions = (-1,) * (2 if has(data.task, "boxes") or has(data.task, "maps") else has(data.task, "sequences"))
    samples, params = np.dtype(exports.type_of(data)), [ParamSpec("level", DataType.string, default)]
    signature = ModelSignature(
        Schema([TensorSpec(samples, (-1, *data.input_shape))]),
        Schema([TensorSpec(np.dtype(np.float32), (-1, data.task.outputs, *positions))]),
        ParamSchema(params) if default else None,
    )
    example = np.zeros((1, *data.input_shape), samples)  # the samples of the run may be private
    # Hide MLflow's recommendation to use type hints, because the model has a signature.
    with warnings.catch_warnings(record=True):
        save_model(
            out,
            python_model=str(SERVING),
            code_paths=list(code),
            artifacts={"levels": str(levels)},
            signature=signature,
            input_example=(example, {"level": default}) if default else example,
            pip_requirements=[f"{package}=={metadata.version(package).partition('+')[0]}" for package in NEEDED],
        )
    if default is None:  # store the files of the level directly in the model's folder, where users expect them
        saved = Model.load(str(out))
        shutil.copytree(out / saved.flavors[FLAVOR_NAME]["artifacts"]["levels"]["path"], out, dirs_exist_ok=True)
        shutil.rmtree(out / "artifacts")
        saved.flavors[FLAVOR_NAME]["artifacts"]["levels"]["path"] = "."
        saved.save(str(out / "MLmodel"))
    return out


def _code(model: str, scratch: Path) -> list[str]:
    """Return paths of an archive of fl_engine, and of the source files that define a user's network."""
    package = Path(fl_engine.__file__).parent
    shutil.copytree(package, scratch / "fl_engine", ignore=shutil.ignore_patterns("__pycache__", "testing"))
    archive = shutil.make_archive(str(scratch / "fl_engine"), "zip", scratch, "fl_engine")
    return [archive, *_own_code(model, scratch / "own")]


def _own_code(model: str, scratch: Path) -> list[str]:
    """Return paths of the source files that define a user's network (package.module:NAME), for the registered model."""
    module, sign, _ = model.partition(":")
    if not sign:
        return []
    package = importlib.import_module(module.partition(".")[0])
    file = Path(str(package.__file__))
    if package.__file__ is None:  # a namespace package can have several folders
        used = Path(str(importlib.import_module(module).__file__)).parents
        file = next(Path(place) for place in package.__path__ if Path(place) in used) / "__init__.py"
    for parent in file.parents:
        if parent.suffix == ".whl":  # the package is the user's own code (`run.code`)
            shutil.unpack_archive(parent, scratch, "zip")
            file = scratch / file.relative_to(parent)
    return [str(file.parent if file.name == "__init__.py" else file)]


def promote(client: Client, run_id: str, model: str) -> list[str]:
    """Set the alias `champion` for versions from an MLflow run, unless newer versions have this alias. `model` is a
    sha256. Returns the models' names. Raises EnvironmentFailure if MLflow does not respond."""
    versions = [v for v in client.search_model_versions(f"run_id = '{run_id}'") if v.tags.get(MODEL) == model]
    for version in versions:
        _give(client, version, CHAMPION)
    return sorted(version.name for version in versions)

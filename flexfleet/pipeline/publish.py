"""Export a finished run's models level by level, and register them in MLflow.

Each new version of a registered model gets the alias `candidate` (`flexfleet regress` gives `champion`):

    <name>            one for the run, which can use any level: mlflow.pyfunc.load_model("models:/<name>@candidate")
    <name>-<level>    a folder with the level's weights and ONNX file: fl_engine.models.export.load
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fl_engine
from fl_engine.backends.in_process import prepare_process
from fl_engine.codecs import codecs_of
from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.samples import Data
from fl_engine.core.task import has_boxes, has_sequences
from fl_engine.core.types import PoolModel
from fl_engine.data import partition_files
from fl_engine.models import export as exports
from fl_engine.models import onnx_comparison, onnx_quantization
from fl_engine.models.export import About
from fl_engine.models.onnx_comparison import Precisions
from fl_engine.models.onnx_quantization import OnnxPrecision
from fl_engine.storage.store import FolderStore, decode, sha256
from flexfleet.config import Config
from flexfleet.files import manifest
from flexfleet.files.artifacts import BareHistory, EvaluationFile, PoolFile
from flexfleet.files.measure import Measure
from flexfleet.pipeline.prepare import Resolved
from flexfleet.reports import precisions
from flexfleet.tracking.record import experiment
from flexfleet.tracking.server import Patient, answering, platform_of
from flexfleet.tracking.trackers import name_in_mlflow

CANDIDATE, CHAMPION = "candidate", "champion"
CALIBRATION = 128
"""Proxy samples that show int8_static the ranges of activations."""
MODEL = "model_sha256"
"""Tag of a version with the sha256 of the global model."""
SERVING = Path(__file__).with_name("serving.py")
NEEDED = ("torch", "numpy", "safetensors", "pydantic", "pyyaml")
"""Packages that loading a registered model requires besides its copy of the engine."""

log = logging.getLogger("flexfleet")


def publish(resolved: Resolved, out: Path, mlflow_run_id: str | None, to: Path) -> list[About]:
    """Export the reported levels of the run in `out` into `to`, and register them if the run is tracked. A second call
    makes no second version."""
    config = resolved.config
    data, levels = export(resolved, out, to)
    if mlflow_run_id is not None and config.tracking.mlflow is not None:
        model = BareHistory.read(out / "history.json").model_sha256
        client = Patient(config.tracking.mlflow, config.run.patience_s)
        register(client, mlflow_run_id, name_of(config), data, to, levels, model)
    return levels


def export(resolved: Resolved, out: Path, to: Path) -> tuple[Data, list[About]]:
    """Export each reported level into a folder, smallest first."""
    manifest.check(out)
    config, data, family = resolved.config, resolved.data, resolved.family
    prepare_process(("cpu",))
    history = BareHistory.read(out / "history.json")
    value = FolderStore(out).get("model.safetensors")
    if sha256(value) != history.model_sha256:
        raise IntegrityError(f"{out / 'model.safetensors'} is damaged: its sha256 is not the one in history.json")
    params = decode(value, str(out / "model.safetensors"))
    parts = partition_files.load(out / "partition", data)
    proxy = torch.from_numpy(np.sort(np.concatenate([parts.proxy_train, parts.proxy_test])))
    scores = EvaluationFile.read(out / "evaluation.json").levels
    shutil.rmtree(to, ignore_errors=True)
    levels = []
    for member in PoolFile.read(out / "pool" / "pool.json").pool():
        if member.reported:
            folder, trained = to / member.name, scores[member.name].value
            made = exports.export(config.model["name"], family, params, member, data, proxy, trained, folder)
            if config.publish.onnx:
                exports.to_onnx(made, data, folder / exports.ONNX)
            log.info("exported %s: %s", member.name, said(made.about))
            if config.publish.measured:
                shown = seeds.rng(config.seed, "calibration").permutation(len(proxy))[:CALIBRATION]
                wanted, sha = precisions_of(config, member), history.model_sha256
                found = onnx_comparison.measure(folder, member.name, wanted, data, proxy[shown], sha)
                for line in precisions.refusals([found]):
                    log.warning("%s", line)
            levels.append(made.about)
    return data, levels


def precisions_of(config: Config, member: PoolModel) -> tuple[OnnxPrecision, ...]:
    """The precisions that a level is published in. `auto` is that of the codec with which it was sent to clients."""
    if config.publish.precision != "auto":
        return tuple(dict.fromkeys(config.publish.precision))
    codecs = member.codecs or codecs_of(config.codec.model_dump())
    return (onnx_quantization.of_codec(codecs.down),)


def said(about: About) -> str:
    """Both values of a level's metric as text."""
    trained, exported = (Measure(about.metric).with_unit(v) for v in (about.accuracy_trained, about.accuracy_exported))
    how = "with the proxy's statistics" if about.proxy_statistics else "as exported"
    return f"{exported} {how}, {trained} in the rounds"


def _card(about: About, found: Precisions | None) -> str:
    """The description of a level's version."""
    return said(about) if found is None else f"{said(about)}\n\n```\n{precisions.table([found])}\n```"


def name_of(config: Config) -> str:
    """The name of the registered models."""
    if config.publish.name:
        return clean(config.publish.name)
    at = None if config.tracking.mlflow is None else platform_of(config.tracking.mlflow)
    return clean(f"{experiment(config, at)}-{config.algorithm['name']}")


def clean(name: str) -> str:
    """Replace the characters that MLflow does not allow."""
    return re.sub(r"[^\w.-]+", "-", name)


# ----------------------------------------------------------------------------------------------- registry
def register(
    client: Patient, run_id: str, name: str, data: Data, folder: Path, levels: Sequence[About], model: str
) -> None:
    """Register the exported levels. `model` is the global model's sha256. Artifacts are stored under its name, so that
    a run with more rounds makes new versions and changes none. Raises ConfigError for a name that MLflow refuses,
    EnvironmentFailure if MLflow does not answer."""
    found = {about.level: onnx_comparison.read(folder / about.level) for about in levels}
    at = f"published/{model[:12]}"
    with tempfile.TemporaryDirectory() as scratch:
        served = _pyfunc(data, folder, levels[-1], Path(scratch))
        with answering(client.uri, "does not take the run's models"):
            run = client.get_run(run_id)
            for about in levels:
                measured = found[about.level]
                values = {f"exported/{about.level}": about.accuracy_exported}
                values |= {} if measured is None else precisions.metrics(measured)
                for key, value in ((name_in_mlflow(each), value) for each, value in values.items()):
                    if run.data.metrics.get(key) != value:
                        client.log_metric(run_id, key, value, timestamp=int(time.time() * 1000))
            for about in levels:
                client.log_artifacts(run_id, str(folder / about.level), f"{at}/levels/{about.level}")
                source = f"{run.info.artifact_uri}/{at}/levels/{about.level}"
                _version(client, f"{name}-{about.level}", source, run_id, model, _card(about, found[about.level]))
            client.log_artifacts(run_id, str(served), f"{at}/model")
            known = ", ".join(about.level for about in levels)
            told = f'Answers for any level: params={{"level": ...}} of {known}.'
            _version(client, name, f"{run.info.artifact_uri}/{at}/model", run_id, model, told)


def _version(client: Any, name: str, source: str, run_id: str, model: str, about: str) -> None:
    """Create a version of a registered model, with the alias `candidate`. An existing version is not changed, and only
    gets the alias if it is the newest and a kill prevented that."""
    from mlflow.exceptions import MlflowException

    quoted = f'"{name}"' if "'" in name else f"'{name}'"

    def versions() -> list[Any]:
        return sorted(client.search_model_versions(f"name = {quoted}"), key=lambda v: int(v.version))

    def is_own(version: Any) -> bool:
        return bool(version.run_id == run_id and version.tags.get(MODEL) == model)

    known = versions()
    if any(map(is_own, known)):
        if is_own(known[-1]):
            _give(client, known[-1], CANDIDATE)
        return
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise ConfigError(f"publish.name: MLflow refuses the name {name!r}: {error.message}") from error
    made = client.create_model_version(name, source, run_id, tags={MODEL: model}, description=about)
    # If the answer is lost, MLflow's client repeats the request, and the server makes one more version.
    for twin in (each for each in versions() if is_own(each) and each.version != made.version):
        with suppress(MlflowException):  # some servers let nobody delete
            client.delete_model_version(name, twin.version)
    _give(client, made, CANDIDATE)


def _give(client: Any, version: Any, alias: str) -> None:
    """Give a version the alias once, unless a newer version has it. So an alias can be moved by hand."""
    given, held = f"flexfleet.{alias}", client.get_registered_model(version.name).aliases.get(alias)
    if given in version.tags:
        return
    if held is None or int(held) < int(version.version):
        client.set_registered_model_alias(version.name, alias, version.version)
    client.set_model_version_tag(version.name, version.version, given, "given")


def _pyfunc(data: Data, folder: Path, largest: About, scratch: Path) -> Path:
    from mlflow.models import ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    answers = (-1, -1) if has_boxes(data.task) else (-1,) if has_sequences(data.task) else ()  # at each place
    samples = TensorSpec(np.dtype(exports.type_of(data)), (-1, *data.input_shape))
    signature = ModelSignature(
        Schema([samples]),
        Schema([TensorSpec(np.dtype(np.float32), (-1, data.task.outputs, *answers))]),
        ParamSchema([ParamSpec("level", DataType.string, largest.level)]),
    )
    code = scratch / "fl_engine"
    shutil.copytree(Path(fl_engine.__file__).parent, code, ignore=shutil.ignore_patterns("__pycache__", "testing"))
    # Hides MLflow's recommendation of type hints, which the signature replaces.
    with warnings.catch_warnings(record=True):
        save_model(
            scratch / "model",
            python_model=str(SERVING),
            code_paths=[str(code), *_own_code(largest.model, scratch / "own")],
            artifacts={"levels": str(folder)},
            signature=signature,
            pip_requirements=[f"{package}=={metadata.version(package).partition('+')[0]}" for package in NEEDED],
        )
    return scratch / "model"


def _own_code(model: str, scratch: Path) -> list[str]:
    """The files of a user's own network (package.module:NAME), which are copied into the model."""
    module, sign, _ = model.partition(":")
    if not sign:
        return []
    package = importlib.import_module(module.partition(".")[0])
    file = Path(str(package.__file__))
    if package.__file__ is None:  # a folder without __init__.py, of which there may be several
        used = Path(str(importlib.import_module(module).__file__)).parents
        file = next(Path(place) for place in package.__path__ if Path(place) in used) / "__init__.py"
    for place in file.parents:
        if place.suffix == ".whl":  # of one's own code (`run.code`)
            shutil.unpack_archive(place, scratch, "zip")
            file = scratch / file.relative_to(place)
    return [str(file.parent if file.name == "__init__.py" else file)]


def promote(client: Patient, run_id: str, model: str) -> list[str]:
    """Give `champion` to the versions of a global model (its sha256) of an MLflow run, unless newer versions have it.
    Returns the models' names. Raises EnvironmentFailure if MLflow does not answer."""
    with answering(client.uri, "does not take a champion"):
        versions = [v for v in client.search_model_versions(f"run_id = '{run_id}'") if v.tags.get(MODEL) == model]
        for version in versions:
            _give(client, version, CHAMPION)
    return sorted(version.name for version in versions)

"""A finished run's models for others to use: exported level by level, and registered in MLflow.

Registered models, each new version with the alias `candidate` (`champion` is given by `flexfleet regress`):

    <name>            one for the run, which answers for any level: mlflow.pyfunc.load_model("models:/<name>@candidate")
    <name>-<level>    a folder with the level's weights and ONNX file: fl_engine.export.load
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fl_engine
from components import common
from components.artifacts import EvaluationFile, History, PoolFile
from components.track import experiment
from fl_engine import export as exports
from fl_engine import partition as partitions
from fl_engine.config import Config
from fl_engine.errors import ConfigError, IntegrityError
from fl_engine.export import About
from fl_engine.store import FolderStore, decode, sha256
from fl_engine.types import Data

CANDIDATE, CHAMPION = "candidate", "champion"
SERVING = Path(__file__).with_name("serving.py")
NEEDED = ("torch", "numpy", "safetensors", "pydantic", "pyyaml")
"""Packages with which a registered model can be loaded: the engine's own code goes with it."""

log = logging.getLogger("flexfleet")


def publish(config: Config, out: Path, mlflow_run_id: str | None, to: Path) -> list[About]:
    """Exports the reported levels of the run in `out` into `to`, and registers them where the run is tracked. Done
    again, it makes no second version. Raises as `fl_engine.export` does."""
    data, levels = export(config, out, to)
    if mlflow_run_id is not None and config.tracking.mlflow is not None:
        register(config.tracking.mlflow, mlflow_run_id, name_of(config), data, to, levels)
    return levels


def export(config: Config, out: Path, to: Path) -> tuple[Data, list[About]]:
    """A folder for each reported level, smallest first."""
    data, family = common.prepare(config)
    history = History.read(out / "history.json")
    value = FolderStore(out).get("model.safetensors")
    if sha256(value) != history.model_sha256:
        raise IntegrityError(f"{out / 'model.safetensors'} is damaged: its sha256 is not the one in history.json")
    params = decode(value, str(out / "model.safetensors"))
    parts = partitions.load(out / "partition", data)
    proxy = torch.from_numpy(np.sort(np.concatenate([parts.proxy_train, parts.proxy_test])))
    scores = EvaluationFile.read(out / "evaluation.json").levels
    shutil.rmtree(to, ignore_errors=True)
    levels = []
    for member in PoolFile.read(out / "pool" / "pool.json").pool():
        if member.reported:
            folder, trained = to / member.name, scores[member.name].accuracy
            made = exports.export(config.model["name"], family, params, member, data, proxy, trained, folder)
            if config.publish.onnx:
                exports.to_onnx(made, data, folder / exports.ONNX)
            levels.append(made.about)
            log.info("exported %s: %s", member.name, said(made.about))
    return data, levels


def said(about: About) -> str:
    """Both accuracies of a level, for people."""
    trained, exported = 100 * about.accuracy_trained, 100 * about.accuracy_exported
    return f"{exported:.2f} % with the proxy's statistics, {trained:.2f} % in the rounds"


def name_of(config: Config) -> str:
    """MLflow's names know neither colons nor slashes."""
    return re.sub(r"[^\w.-]+", "-", config.publish.name or f"{experiment(config)}-{config.algorithm['name']}")


# ----------------------------------------------------------------------------------------------- registry
def register(uri: str, run_id: str, name: str, data: Data, folder: Path, levels: Sequence[About]) -> None:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    root = client.get_run(run_id).info.artifact_uri
    with tempfile.TemporaryDirectory() as scratch, _hushed():
        for about in levels:
            client.log_artifacts(run_id, str(folder / about.level), f"levels/{about.level}")
            client.log_metric(run_id, f"exported/{about.level}", about.accuracy_exported)
            _version(client, f"{name}-{about.level}", f"{root}/levels/{about.level}", run_id, said(about))
        served = _pyfunc(data, folder, levels[-1].level, Path(scratch))
        client.log_artifacts(run_id, str(served), "model")
    known = ", ".join(about.level for about in levels)
    _version(client, name, f"{root}/model", run_id, f'Answers for any level: params={{"level": ...}} of {known}.')


def _version(client: Any, name: str, source: str, run_id: str, about: str) -> None:
    """The run's version of a registered model, and the alias `candidate` for it."""
    from mlflow.exceptions import MlflowException

    found = [v for v in client.search_model_versions(f"name = '{name}'") if v.run_id == run_id]
    if not found:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise ConfigError(f"publish.name: MLflow takes no model named {name!r}: {error.message}") from error
        found = [client.create_model_version(name, source, run_id, description=about)]
    client.set_registered_model_alias(name, CANDIDATE, found[0].version)


def _pyfunc(data: Data, folder: Path, default: str, scratch: Path) -> Path:
    from mlflow.models import ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    images = TensorSpec(np.dtype(np.uint8), (-1, *data.input_chw))
    signature = ModelSignature(
        Schema([images]),
        Schema([TensorSpec(np.dtype(np.float32), (-1, data.classes))]),
        ParamSchema([ParamSpec("level", DataType.string, default)]),
    )
    code = scratch / "fl_engine"
    shutil.copytree(Path(fl_engine.__file__).parent, code, ignore=shutil.ignore_patterns("__pycache__", "testing"))
    save_model(
        scratch / "model",
        python_model=str(SERVING),
        code_paths=[str(code)],
        artifacts={"levels": str(folder)},
        signature=signature,
        pip_requirements=[f"{package}=={metadata.version(package)}" for package in NEEDED],
    )
    return scratch / "model"


@contextmanager
def _hushed() -> Iterator[None]:
    """MLflow recommends type hints and input examples, which images of any number are too large for, and draws bars."""
    before = os.environ.get("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR")
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"]
        else:
            os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = before


def promote(uri: str, run_id: str) -> list[str]:
    """Gives `champion` to the versions that the MLflow run has; the models' names."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    versions = client.search_model_versions(f"run_id = '{run_id}'")
    for version in versions:
        client.set_registered_model_alias(version.name, CHAMPION, version.version)
    return sorted(version.name for version in versions)

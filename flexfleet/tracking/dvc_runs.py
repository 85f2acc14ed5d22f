"""Parts of a finished run in a DVC remote: pushed when it ends, and fetched by the pointers in its MLflow run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fl_engine.core.errors import ConfigError, IntegrityError, masked
from fl_engine.storage.store import sha256
from flexfleet.tracking.dvc_remote import Taken, checksum, made_once, place_of, pull, push
from flexfleet.tracking.server import Patient, answering

OF_RUN = ("partition", "pool", "model.safetensors", "report.html")
"""Parts of a run's folder that are pushed."""
POINTERS = "dvc"
"""Folder of the pointers, in a run's folder and among the artifacts of its MLflow run."""


def push_run(out: Path, remote: str) -> dict[str, str]:
    """Push the parts OF_RUN of a finished run, and write the pointers into its folder. Returns tags with their
    checksums."""
    pointers = push({name: out / name for name in OF_RUN}, remote)
    for name, text in pointers.items():
        (out / POINTERS).mkdir(exist_ok=True)
        (out / POINTERS / f"{name}.dvc").write_text(text, encoding="utf-8")
    return {"dvc.remote": place_of(remote), **{f"dvc.{name}": checksum(text) for name, text in pointers.items()}}


def fetch_run(uri: str, mlflow_run_id: str, out: Path) -> list[Path]:
    """Fetch what a run pushed into the new folder `out`, by the pointers in its MLflow run.

    Raises:
        ConfigError: MLflow does not have the run, the run pushed nothing, or `out` exists.
        EnvironmentFailure: MLflow does not answer.
        IntegrityError: MLflow or the remote has lost or changed something. `out` does not exist then.
    """
    client = Patient(uri, 0.0)
    from mlflow.exceptions import MlflowException

    if out.exists():
        raise ConfigError(f"{out} exists already. Give another --out, or remove it")
    with answering(uri, "does not give the run"):
        try:
            tags = client.get_run(mlflow_run_id).data.tags
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise ConfigError(masked(f"{uri} has no run {mlflow_run_id}: {error.message}")) from error
    if "dvc.remote" not in tags:
        raise ConfigError(f"the run {mlflow_run_id} pushed nothing, because publish.dvc was null")
    with tempfile.TemporaryDirectory() as scratch, answering(uri, "does not give the run's pointers"):
        got = client.download_artifacts(mlflow_run_id, POINTERS, scratch)
        pointers = {path.stem: path.read_text("utf-8") for path in sorted(Path(got).iterdir())}
    pushed = {key.removeprefix("dvc.") for key in tags if key.startswith("dvc.")} - {"remote"}
    if missing := sorted(pushed - pointers.keys()):
        raise IntegrityError(f"MLflow has lost the pointers of {', '.join(missing)}, which the run pushed")
    for name, text in pointers.items():
        if (says := checksum(text)) != (tag := tags.get(f"dvc.{name}")):
            raise IntegrityError(f"{name}: its pointer has md5 {says}, but the run's tag has {tag}")
    try:
        with made_once(out) as part:
            pull(pointers, tags["dvc.remote"], part)
            actual, expected = sha256((part / "model.safetensors").read_bytes()), tags.get("model_sha256")
            if expected is not None and actual != expected:
                raise IntegrityError(f"the model's sha256 is {actual}, but the run's tag has {expected}")
    except Taken as error:
        raise ConfigError(f"{out} was created by another process. Give another --out") from error
    return [out / name for name in pointers]

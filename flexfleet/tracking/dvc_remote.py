"""Push files to the DVC remote `publish.dvc`, and fetch files and data sets with DVC. A pointer is a string with the
contents of a `.dvc` file. A remote is the name of a remote in DVC's configuration, an address or a folder.

Each push or pull uses a new scratch repository, because DVC locks a repository during an operation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import (
    ConfigError,
    DataError,
    EnvironmentFailure,
    FlexfleetError,
    IntegrityError,
    did_you_mean,
    masked,
)
from fl_engine.core.system import hashed
from fl_engine.core.text import read_yaml
from fl_engine.datasets import data_root
from fl_engine.storage.s3 import check_place
from fl_engine.storage.s3_settings import setting
from flexfleet.tracking.databases import causes
from flexfleet.tracking.server import Client, code_of

MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")
"""Pattern of a DVC checksum. The checksum of a folder is the md5 of the file list, followed by `.dir`."""
LOGGERS = ("dvc", "dvc_data", "dvc_objects")
"""Names of DVC loggers that log each failure with a traceback."""

log = logging.getLogger("flexfleet")


def push(paths: Mapping[str, Path], remote: str) -> dict[str, str]:
    """Push files and folders to the remote, and return {name: pointer}. Raises ConfigError if the address of the remote
    is malformed, and EnvironmentFailure if the remote is unreachable."""
    with _scratch(remote, EnvironmentFailure) as (repo, folder):
        for name, path in paths.items():
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, folder / name)
        repo.add([str(folder / name) for name in paths])
        repo.push(targets=[str(folder / name) for name in paths])
        return {name: (folder / f"{name}.dvc").read_text("utf-8") for name in paths}


def pull(pointers: Mapping[str, str], remote: str, out: Path) -> list[Path]:
    """Create the folder `out`, and fetch files and folders into it. Raises ConfigError if a pointer is malformed, or if
    the remote folder does not exist. Raises IntegrityError and does not create `out` if content is missing."""
    for text in pointers.values():
        checksum(text)
    if "://" not in place_of(remote) and not Path(place_of(remote)).is_dir():
        raise ConfigError.at(f"publish.dvc: {place_of(remote)} must be an existing folder")
    with _scratch(remote, IntegrityError) as (repo, folder):
        for name, text in pointers.items():
            (folder / f"{name}.dvc").write_text(text, encoding="utf-8")
        repo.pull(targets=[str(folder / f"{name}.dvc") for name in pointers])
        out.mkdir(parents=True)
        return [Path(shutil.move(folder / name, out / name)) for name in pointers]


def delete(gone: Iterable[str], kept: Iterable[str], remote: str, dry_run: bool) -> int:
    """Delete the objects of the checksums `gone`, except for objects of the checksums `kept`. Return the total size in
    bytes. If `dry_run` is True, delete nothing. Raises EnvironmentFailure if the remote is unreachable."""
    with _scratch(remote, EnvironmentFailure) as (repo, _):
        store = repo.cloud.get_remote_odb("here")

        def objects(checksums: Iterable[str]) -> set[str]:
            there = {each for each in checksums if store.exists(each)}
            lists = [json.loads(store.fs.cat_file(store.oid_to_path(each))) for each in there if each.endswith(".dir")]
            return there | {file["md5"] for files in lists for file in files if store.exists(file["md5"])}

        unused = sorted(objects(gone) - objects(kept), key=lambda each: each.endswith(".dir"))  # lists last
        total: int = sum(store.fs.size(store.oid_to_path(each)) for each in unused)
        for each in () if dry_run else unused:
            store.delete(each)
        return total


def probe(remote: str) -> None:
    """Create and delete a file in the remote. Raises the errors of `push`."""
    with _scratch(remote, EnvironmentFailure) as (repo, _):
        store = repo.cloud.get_remote_odb("here")
        file = store.fs.join(store.path, f"probe-{uuid.uuid4().hex[:8]}")
        store.fs.pipe_file(file, b"flexfleet checks that it can write here")
        store.fs.rm_file(file)


def hand_on(path: Path, name: str, remote: str | None, pointer: Path) -> None:
    """Push the output of a step, and write the pointer for later tasks. The pointer is empty if `remote` is None."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text("" if remote is None else push({name: path}, remote)[name], encoding="utf-8")


def checksum(pointer: str) -> str:
    """Return the checksum that a pointer contains (see MD5). Raises ConfigError if the pointer is malformed."""
    try:
        (out,) = read_yaml(pointer)["outs"]
        if MD5.fullmatch(out["md5"]):
            return str(out["md5"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        pass
    raise ConfigError(f"{pointer[:80]!r} is not a .dvc pointer. Push the files again")


# ------------------------------------------------------------------------------------------------ DVC itself
@contextmanager
def _scratch(remote: str, missing: type[FlexfleetError]) -> Iterator[tuple[Any, Path]]:
    """Yield a temporary DVC repository and its folder. Raises an error of the class `missing` if content is missing or
    DVC fails, and EnvironmentFailure for network and file system errors. The messages contain the reason from DVC's
    log, because DVC's exception contains only the number of failed transfers."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc_objects.errors import ObjectFormatError

    logged = BufferingHandler(capacity=10**6)
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(logging.ERROR)
        logger.propagate, logger.handlers = False, [logged]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        try:
            Repo.init(str(folder), no_scm=True).close()
            core = {"analytics": False, "remote": "here", "site_cache_dir": str(folder / ".dvc" / "site")}
            # DVC's configuration files must be ASCII, so options with paths are passed as arguments.
            remotes = {**_remotes(), "here": _remote(remote)}
            with Repo(str(folder), config={"core": core, "remote": remotes}) as repo:
                yield repo, folder
        except FlexfleetError:
            raise
        except Exception as error:
            reason = next((record.exc_info[1] for record in logged.buffer if record.exc_info), None) or error
            is_missing = isinstance(reason, DvcException | ObjectFormatError | FileNotFoundError)
            kind = missing if isinstance(error, DvcException | ObjectFormatError) and is_missing else EnvironmentFailure
            text = " ".join(masked(str(reason)).split())
            raise kind(f"DVC at {masked(remote)}: {type(reason).__name__}: {text}") from error


def _remotes() -> dict[str, dict[str, Any]]:
    """Map the names of the remotes in DVC's configuration to their options. The configuration consists of the files of
    the user and of the DVC repository that contains the working directory."""
    from dvc.config import Config
    from dvc.exceptions import DvcException

    try:
        return {name: {**options, "url": str(options["url"])} for name, options in Config.from_cwd()["remote"].items()}
    except DvcException as error:
        raise ConfigError(f"DVC's configuration cannot be read: {masked(str(error))}", path="publish.dvc") from error


def _known(remote: str) -> dict[str, Any] | None:
    """Return the options of a remote in DVC's configuration, which `remote` names or whose address it is."""
    return next((each for name, each in _remotes().items() if remote in (name, masked(each["url"]))), None)


def check(remote: str) -> None:
    """Raise ConfigError if the remote is neither a name in DVC's configuration nor an address nor a folder. Warn if it
    is only the name of a new folder."""
    if _known(remote) is not None:
        return
    check_place("publish.dvc", remote)
    if "/" not in remote and not Path(remote).exists():
        if names := sorted(_remotes()):
            raise ConfigError.at(
                f"publish.dvc must be a DVC remote ({', '.join(names)}), s3://bucket/prefix or a folder, got {remote!r}"
                f"{did_you_mean(remote, names)}. Write ./{remote} for a new folder"
            )
        log.warning("publish.dvc: DVC has no remote %r here, so files are pushed to the folder ./%s", remote, remote)


def place_of(remote: str) -> str:
    """Return the address of the remote without its password. If the remote is a folder, return its absolute path."""
    place = masked(str((_known(remote) or {"url": remote})["url"]))
    return place if "://" in place else str(Path(place).resolve())


def _remote(remote: str) -> dict[str, Any]:
    """Return the remote's options for DVC. With the option `verify`, DVC checks the md5 of downloaded files."""
    if (known := _known(remote)) is not None:
        return {**known, "verify": True}
    check_place("publish.dvc", remote)
    if "://" not in remote:
        return {"url": place_of(remote), "verify": True}
    given = {
        "endpointurl": setting("AWS_ENDPOINT_URL_S3") or setting("AWS_ENDPOINT_URL"),
        "access_key_id": setting("AWS_ACCESS_KEY_ID"),
        "secret_access_key": setting("AWS_SECRET_ACCESS_KEY"),
        "session_token": setting("AWS_SESSION_TOKEN"),
        "region": setting("AWS_REGION") or setting("AWS_DEFAULT_REGION"),
    }
    return {"url": remote, "verify": True, **{key: value for key, value in given.items() if value}}


# ------------------------------------------------------------------------------------------------ runs
OF_RUN = ("partition", "pool", "model.safetensors", "report.html")
"""Files and subfolders of a run folder that are pushed."""
POINTERS = "dvc"
"""Name of the subfolder with pointers, in the run's folder and in the MLflow artifacts."""


def push_run(out: Path, remote: str) -> dict[str, str]:
    """Push a finished run's files, write their pointers into its folder, and return MLflow tags with the checksums."""
    pointers = push({name: out / name for name in OF_RUN}, remote)
    for name, text in pointers.items():
        (out / POINTERS).mkdir(exist_ok=True)
        (out / POINTERS / f"{name}.dvc").write_text(text, encoding="utf-8")
    return {"dvc.remote": place_of(remote), **{f"dvc.{name}": checksum(text) for name, text in pointers.items()}}


def fetch_run(uri: str, mlflow_run_id: str, out: Path) -> list[Path]:
    """Create the folder `out`, and fetch the files that a run has pushed. The pointers are read from the MLflow run.

    Raises:
        ConfigError: The run does not exist in MLflow or has not pushed files, or `out` already exists.
        EnvironmentFailure: MLflow is unreachable.
        IntegrityError: The content that the run pushed is missing in the remote. `out` is not created.
    """
    client = Client(uri)
    if out.exists():
        raise ConfigError(f"{out} exists already. Choose another --out, or remove the folder")
    try:
        tags = client.get_run(mlflow_run_id).data.tags
    except EnvironmentFailure as error:
        if code_of(error) not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(f"the run {mlflow_run_id} does not exist in MLflow: {error}") from error
    if "dvc.remote" not in tags:
        raise ConfigError(f"the run {mlflow_run_id} has not pushed any files, because publish.dvc was null")
    with tempfile.TemporaryDirectory() as scratch:
        got = client.download_artifacts(mlflow_run_id, POINTERS, scratch)
        pointers = {path.stem: path.read_text("utf-8") for path in sorted(Path(got).iterdir())}
    return pull(pointers, tags["dvc.remote"], out)


def pushed_by_others(client: Client, run_ids: Collection[str]) -> set[str]:
    """Return the checksums of all files that MLflow runs other than `run_ids` have pushed."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.`dvc.remote` != ''", max_results=50_000)
    tags = [tag for run in runs if run.info.run_id not in run_ids for tag in run.data.tags.values()]
    return {tag for tag in tags if MD5.fullmatch(tag)}


# ------------------------------------------------------------------------------------------------ DVC data sets
REV = re.compile(r"(?P<repo>.+)@(?P<rev>[^@:]+):(?P<path>[^:]+)")
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Subclasses of OSError that are raised for a wrong path. Other OSErrors mean that the network or the disk failed."""


def folder_of(root: str | None) -> Path:
    """Return the folder that contains the files of a data set. `root` is `dataset.root`: a folder, or `repo@rev:path`
    to fetch a path from a DVC repository.

    Raises:
        DataError: The folder, repository, revision or path does not exist.
        EnvironmentFailure: The network or the disk fails.
        IntegrityError: The content does not match the checksum that DVC recorded.
    """
    match = None if root is None else REV.fullmatch(root)
    if root is None or match is None or not is_fetched(root):
        return data_root(root)
    from dvc.api import DVCFileSystem

    what = f"dataset.root = {masked(root)}"
    try:
        files = DVCFileSystem(match["repo"], rev=match["rev"])
        name = f"{match['repo']}@{files.repo.get_rev()}:{match['path']}"
        cached = data_root() / "dvc" / hashlib.sha256(name.encode()).hexdigest()[:24]
        if not cached.exists():
            log.info("%s: fetching", what)
            cached.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
                part = Path(scratch) / cached.name
                _get(files, match["path"], part)
                with suppress(OSError):  # another process created the folder first
                    part.rename(cached)
        return cached
    except FlexfleetError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:  # DVC, git and file systems raise errors without a common class
        chain = list(causes(error))
        failed = any(isinstance(each, OSError) and not isinstance(each, MISSING) for each in chain)
        message = f"{what} is not available: {type(chain[-1]).__name__}: {masked(str(chain[-1]))}"
        raise (EnvironmentFailure(message) if failed else DataError(message, path="dataset.root")) from error


def is_fetched(root: str) -> bool:
    """Return whether `root` names a path in a DVC repository, and is not an existing folder."""
    return REV.fullmatch(root) is not None and not Path(root).exists()


def _get(files: Any, path: str, part: Path) -> None:
    """Copy a file or folder from a DVC repository to `part`. Raises IntegrityError if a checksum differs, because DVC
    itself does not compare checksums."""
    files.get(path, str(part), recursive=True)
    for name in files.find(path):
        # The md5 is missing for files in git and for files that were added with DVC 2.
        recorded = (files.info(name).get("dvc_info") or {}).get("md5")
        if recorded is None:
            continue
        found = hashed(part / os.path.relpath(name, path), hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != recorded:
            raise IntegrityError(
                f"{name} has the md5 {found}, expected {recorded}. If the change is intended, run dvc add. "
                "Otherwise delete the file from the remote and run dvc push"
            )

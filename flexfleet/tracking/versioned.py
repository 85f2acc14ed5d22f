"""Folders and files kept by DVC: pushed to a remote under their content's md5, and found again by a small pointer.

A pointer is the text of a `.dvc` file; the remote is `publish.dvc`. DVC works in a scratch repository of its own each
time: one repository's lock does not take two writers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from fl_engine.core.errors import ConfigError, DataError, EnvironmentFailure, FlexfleetError, IntegrityError, masked
from fl_engine.core.plain import read_yaml
from fl_engine.core.system import hashed
from fl_engine.data.files import part_of, remove, replacing, sweep
from fl_engine.data.packs import INDEX, Seen, seen
from fl_engine.datasets import data_root
from fl_engine.storage.places import check_place
from fl_engine.storage.s3 import setting
from fl_engine.storage.store import sha256
from flexfleet.tracking.server import address, answering, client_of

OF_RUN = ("partition", "pool", "model.safetensors", "report.html")
"""The parts of a run's folder that are pushed."""
POINTERS = "dvc"
"""Folder of the pointers, in a run's folder and among the artifacts of its MLflow run."""
LIST = ".dir"
"""How the sum of a folder, which is that of the list of its files, ends in DVC."""
MD5 = re.compile(rf"[0-9a-f]{{32}}({re.escape(LIST)})?")
LOGGERS = ("dvc", "dvc_data", "dvc_objects")
"""They tell each failure, which is raised too, with a traceback."""
REV = re.compile(r"(?P<repo>.+)@(?P<rev>[^@:]+):(?P<path>[^:]+)")

log = logging.getLogger("flexfleet")


def push(paths: Mapping[str, Path], remote: str) -> dict[str, str]:
    """Pushes files and folders under plain names, and gives their pointers. What the remote has is read, and sent again
    only if it is damaged there.

    Raises ConfigError for a malformed remote, EnvironmentFailure if it cannot be reached.
    """
    with _scratch(remote) as (repo, folder):
        for name, path in paths.items():
            if path.is_dir():
                shutil.copytree(path, folder / name)
            else:
                shutil.copyfile(path, folder / name)
        with _explained(remote, EnvironmentFailure):
            repo.add([str(folder / name) for name in paths])
            _remove_damaged(repo, remote)
            repo.push(targets=[str(folder / name) for name in paths])
        return {name: (folder / f"{name}.dvc").read_text("utf-8") for name in paths}


def _remove_damaged(repo: Any, remote: str) -> None:
    """Removes from the remote what is damaged there, of all that is to be pushed, and the list of a folder of which a
    file is damaged or missing: of what is there, and of the files in a list that is there, DVC sends nothing. Reads
    what is there already."""
    from dvc_data.hashfile.hash import hash_file
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    there, here = repo.cloud.get_remote_odb(), repo.cache.local

    def drop(sum: str) -> None:
        with suppress(FileNotFoundError):  # another process does the same
            there.fs.remove(there.oid_to_path(sum))

    def is_whole(sum: str) -> bool:
        try:
            _, found = hash_file(there.oid_to_path(sum), there.fs, "md5")
        except FileNotFoundError:
            return False
        if found.value == sum.removesuffix(LIST):
            return True
        log.warning("DVC at %s: %s is damaged there, and is sent again", masked(remote), there.oid_to_path(sum))
        drop(sum)
        return False

    sums = list(here.all())
    # Before their files, since whoever pushes at the same time sends a list after its files.
    lists = [sum for sum in sums if sum.endswith(LIST) and is_whole(sum)]
    whole = {sum for sum in sums if not sum.endswith(LIST) and is_whole(sum)}
    for sum in lists:
        if not {of.value for _, _, of in Tree.load(here, HashInfo("md5", sum))} <= whole:
            drop(sum)


def pull(pointers: Mapping[str, str], remote: str, out: Path) -> list[Path]:
    """Fetches into `out` what the pointers name, and replaces what is there. Raises IntegrityError if the remote lacks
    something or has other content, ConfigError for a text that is no pointer, and for a remote whose folder is not
    there."""
    wanted = {name: checksum(text) for name, text in pointers.items()}
    if "://" not in remote and not Path(remote).is_dir():
        counts = "" if Path(remote).is_absolute() else f" ({remote} counts from the folder where it was pushed)"
        raise ConfigError(f"the folder of the DVC remote, {_address(remote)}, is not there{counts}: fetch where it is")
    with _scratch(remote) as (repo, folder):
        for name, text in pointers.items():
            (folder / f"{name}.dvc").write_text(text, encoding="utf-8")
        with _explained(remote, IntegrityError):
            if lost := _lost(repo, wanted):
                raise IntegrityError(f"DVC at {masked(remote)} does not have {', '.join(lost)}: push it again")
            repo.pull(targets=[str(folder / f"{name}.dvc") for name in pointers])
        for name, expected in wanted.items():
            if not (folder / name).exists() or (actual := md5(folder / name)) != expected:
                has = f"md5 {actual}" if (folder / name).exists() else "nothing"
                raise IntegrityError(f"{name}: {masked(remote)} has {has} where the pointer says {expected}")
        brought = []
        for name in pointers:
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(folder / name, target)
            brought.append(target)
    return brought


def _lost(repo: Any, wanted: Mapping[str, str]) -> list[str]:
    """The files that the remote does not have, of those with these sums, by name."""
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    there = repo.cloud.get_remote_odb()

    def lacks(sum: str) -> bool:
        try:
            there.fs.info(there.oid_to_path(sum))
        except FileNotFoundError:
            return True
        return False

    lost = []
    for name, sum in wanted.items():
        files = {name: sum}
        if sum.endswith(LIST) and not lacks(sum):
            files = {"/".join((name, *key)): of.value for key, _, of in Tree.load(there, HashInfo("md5", sum))}
        lost += [file for file, of in files.items() if lacks(of)]
    return lost


def hand_on(path: Path, name: str, remote: str | None, pointer: Path) -> None:
    """Pushes a step's output, and writes its pointer for the following tasks; an empty file if there is no remote."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text("" if remote is None else push({name: path}, remote)[name], encoding="utf-8")


def push_run(out: Path, remote: str) -> dict[str, str]:
    """Pushes the parts OF_RUN of a finished run, and writes the pointers into its folder. Gives tags with the checksums
    to which they point."""
    pointers = push({name: out / name for name in OF_RUN}, remote)
    for name, text in pointers.items():
        (out / POINTERS).mkdir(exist_ok=True)
        (out / POINTERS / f"{name}.dvc").write_text(text, encoding="utf-8")
    return {"dvc.remote": _address(remote), **{f"dvc.{name}": checksum(text) for name, text in pointers.items()}}


def fetch_run(uri: str, mlflow_run_id: str, out: Path) -> list[Path]:
    """Fetches what a run pushed into the new folder `out`, by the pointers in its MLflow run.

    Raises ConfigError if MLflow does not know the run, if the run pushed nothing, if the remote is a folder that is not
    there, or if `out` exists; EnvironmentFailure if MLflow does not answer; IntegrityError if MLflow or the remote has
    lost or changed something: then there is nothing in `out`.
    """
    client = client_of(uri)
    from mlflow import artifacts
    from mlflow.exceptions import MlflowException

    if out.exists():
        raise ConfigError(f"{out} exists already: give another --out, or remove it")
    with answering(uri, "does not give the run"):
        try:
            tags = client.get_run(mlflow_run_id).data.tags
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise ConfigError(masked(f"{uri} has no run {mlflow_run_id}: {error.message}")) from error
    if "dvc.remote" not in tags:
        raise ConfigError(f"the run {mlflow_run_id} pushed nothing: it had publish.dvc=null")
    with tempfile.TemporaryDirectory() as scratch, answering(uri, "does not give the run's pointers"):
        got = artifacts.download_artifacts(
            run_id=mlflow_run_id, artifact_path=POINTERS, dst_path=scratch, tracking_uri=address(uri)
        )
        pointers = {path.stem: path.read_text("utf-8") for path in sorted(Path(got).iterdir())}
    pushed = {key.removeprefix("dvc.") for key in tags if key.startswith("dvc.")} - {"remote"}
    if missing := sorted(pushed - pointers.keys()):
        raise IntegrityError(f"the run pushed {', '.join(missing)} too, of which MLflow has lost the pointer")
    for name, text in pointers.items():
        if (says := checksum(text)) != (tag := tags.get(f"dvc.{name}")):
            raise IntegrityError(f"{name}: its pointer says md5 {says}, the run's tag {tag}")
    try:
        with _new(out) as part:
            pull(pointers, tags["dvc.remote"], part)
            actual, expected = sha256((part / "model.safetensors").read_bytes()), tags.get("model_sha256")
            if expected is not None and actual != expected:
                raise IntegrityError(f"the model's sha256 is {actual}, the run's tag says {expected}")
    except _Taken as error:
        raise ConfigError(f"{out} was made by another process meanwhile: give another --out") from error
    return [out / name for name in pointers]


def checksum(pointer: str) -> str:
    """The md5 that a pointer names; for a folder it ends in `.dir`. Raises ConfigError."""
    try:
        (out,) = read_yaml(pointer)["outs"]
        if MD5.fullmatch(out["md5"]):
            return str(out["md5"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        pass
    raise ConfigError(f"not a .dvc pointer: {pointer[:80]!r}")


def md5(path: Path) -> str:
    """The md5 that DVC computes: of a file's content; for a folder, of the list of its files."""
    if path.is_file():
        return hashed(path, hashlib.md5(usedforsecurity=False)).hexdigest()
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    listed = json.dumps([{"md5": md5(path / name), "relpath": name} for name in files])
    return hashlib.md5(listed.encode(), usedforsecurity=False).hexdigest() + LIST


# ------------------------------------------------------------------------------------ a data set kept by DVC
def folder_of(root: str | None) -> Path:
    """The folder of a data set's files, for `dataset.root`: a folder; or `repo@rev:path` of a DVC repository (an
    address or a folder), or a `.dvc` file. The latter two are first fetched into the cache below the data root.

    Raises DataError if they are not there, EnvironmentFailure if the network or the disk fails, IntegrityError if other
    content arrives than DVC has recorded, or if what was fetched has changed in the cache.
    """
    try:
        if root is not None and (match := REV.fullmatch(root)) and not Path(root).exists():
            return _at_revision(match["repo"], match["rev"], match["path"])
        if root is not None and root.endswith(".dvc"):
            return _pointed_to(Path(root))
    except OSError as error:
        raise DataError(f"dataset.root = {masked(root or '')[:200]} cannot be read: {error.strerror}") from error
    return data_root(root)


def _at_revision(url: str, rev: str, path: str) -> Path:
    from dvc.api import DVCFileSystem

    what = f"dataset.root = {masked(url)}@{rev}:{path}"
    try:
        files = DVCFileSystem(url, rev=rev)
        commit = files.repo.get_rev()

        def get(part: Path) -> None:
            log.info("%s: fetching %s", what, commit[:12])
            _get(files, path, part)

        return _cached(f"{url}@{commit}:{path}", get)
    except FlexfleetError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:  # DVC, git and the file systems each have their own errors
        raise _not_to_be_had(what, error) from error


NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the system by which a repository, or something in it, is not to be had, though network and disk work."""


def _not_to_be_had(what: str, error: BaseException) -> FlexfleetError:
    """Names the first error of the chain, of which DVC and git each make another one."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    failed = any(isinstance(each, OSError) and not isinstance(each, NOT_THERE) for each in chain)
    kinds = dict.fromkeys(type(each).__name__ for each in (error, chain[-1]))
    said = f"{what} is not to be had: {': '.join(kinds)}: {masked(str(chain[-1]))}"
    return EnvironmentFailure(said) if failed else DataError(said)


def _pointed_to(pointer: Path) -> Path:
    """Fetches what a .dvc file of a repository on this machine names, from that repository's remote."""
    if not pointer.is_file():
        raise DataError(f"dataset.root = {pointer} does not exist: give a .dvc file, a folder, or repo@rev:path")
    from dvc.repo import Repo

    def get(part: Path) -> None:
        with Repo(str(pointer.parent)) as repo:
            log.info("dataset.root = %s: fetching", pointer)
            repo.fetch(targets=[str(pointer)])
            _get(repo.dvcfs, os.path.relpath(pointer.with_suffix(""), repo.root_dir), part)

    wanted = checksum(pointer.read_text(encoding="utf-8", errors="replace"))
    try:
        return _cached(wanted, get)
    except FlexfleetError as error:
        raise type(error)(f"dataset.root = {pointer}: {error}") from error
    except Exception as error:
        raise _not_to_be_had(f"dataset.root = {pointer}", error) from error


def _get(files: Any, path: str, part: Path) -> None:
    """Copies a file or folder of a DVC repository to `part`. Raises IntegrityError for content that is not what DVC has
    recorded, which DVC itself does not look at."""
    files.get(path, str(part), recursive=True)
    for name in files.find(path):
        # None: kept by git, or with a sum of another kind, such as that of DVC 2, which ignores line ends.
        recorded = (files.info(name).get("dvc_info") or {}).get("md5")
        if recorded is not None and (found := md5(part / os.path.relpath(name, path))) != recorded:
            raise IntegrityError(
                f"of {name} content with md5 {found} arrived, and {recorded} is recorded: the file has changed in the "
                "repository's folder (dvc add records it, dvc checkout undoes it), or is damaged in the remote or the "
                "repository's DVC cache (delete it there, and push it again)"
            )


SUMS = TypeAdapter(dict[str, Seen])


def _cached(name: str, get: Callable[[Path], None]) -> Path:
    """The file or folder of this name in the cache below the data root, which `get` makes where it is not there. Raises
    IntegrityError where it is not as it was fetched."""
    cached = data_root() / "dvc" / hashlib.sha256(name.encode()).hexdigest()[:24]
    sums = cached.with_name(f"{cached.name}.json")
    if cached.exists():
        _check_as_fetched(cached, sums)
        return cached
    with suppress(_Taken):
        with _new(cached) as part:
            get(part)
        inside = [cached] if cached.is_file() else [path for path in sorted(cached.rglob("*")) if path.is_file()]
        own = [path for path in inside if not (path.parent / INDEX).exists()]  # a pack has its own sums, and may change
        with replacing(sums) as out:
            out.write(SUMS.dump_json({os.path.relpath(path, cached): seen(path) for path in own}))
    return cached


def _check_as_fetched(cached: Path, sums: Path) -> None:
    """Reads only files with other sizes or times than they had then."""
    if not sums.exists():  # fetched by an earlier version, or by a process that was killed just then
        return
    again = f"delete {cached}, and it is fetched again"
    try:
        known = SUMS.validate_json(sums.read_bytes())
    except ValidationError as error:
        raise IntegrityError(f"{sums} is damaged: {again}") from error
    for name, before in known.items():
        try:
            same = seen(cached / name, before).sha256 == before.sha256
        except DataError:
            same = False
        if not same:
            raise IntegrityError(f"{cached / name} is not what was fetched: {again}")


class _Taken(Exception):
    """Another process was quicker."""


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A folder or file to write, which gets the name `path` only if all went well. Raises _Taken if it is there by
    then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep([path])
    part = part_of(path)
    try:
        yield part
        try:
            part.rename(path)
        except OSError as error:
            if not path.exists():
                raise
            raise _Taken from error
    finally:
        with suppress(OSError):  # it has its name
            remove(part)


# ------------------------------------------------------------------------------------------------ DVC itself
@contextmanager
def _scratch(remote: str) -> Iterator[tuple[Any, Path]]:
    try:
        from dvc.repo import Repo
    except ImportError as error:
        raise EnvironmentFailure("publish.dvc wants dvc: pip install 'flexfleet[data]'") from error
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        try:
            with Repo.init(str(folder), no_scm=True) as made, made.config.edit("local") as config:
                config["core"] = {"analytics": False, "remote": "here", "site_cache_dir": str(folder / ".dvc" / "site")}
                config["remote"] = {"here": _remote(remote)}
            with Repo(str(folder)) as repo:
                yield repo, folder
        except sqlite3.Error as error:  # of the files in which DVC keeps what it has seen
            raise EnvironmentFailure(f"DVC cannot write into the temporary folder {folder.parent}: {error}") from error


def _address(remote: str) -> str:
    """What names the remote from everywhere: of a folder the whole path."""
    return remote if "://" in remote else str(Path(remote).resolve())


def _remote(remote: str) -> dict[str, Any]:
    """The remote's options. `verify`: DVC computes the md5 of what the remote sends."""
    check_place("publish.dvc", remote)
    if "://" not in remote:
        return {"url": _address(remote), "verify": True}
    given = {
        "endpointurl": setting("AWS_ENDPOINT_URL_S3") or setting("AWS_ENDPOINT_URL"),
        "access_key_id": setting("AWS_ACCESS_KEY_ID"),
        "secret_access_key": setting("AWS_SECRET_ACCESS_KEY"),
        "session_token": setting("AWS_SESSION_TOKEN"),
        "region": setting("AWS_REGION") or setting("AWS_DEFAULT_REGION"),
    }
    return {"url": remote, "verify": True, **{key: value for key, value in given.items() if value}}


@contextmanager
def _explained(remote: str, kind: type[FlexfleetError]) -> Iterator[None]:
    """Turns errors of DVC into `kind`, that of a damaged list of a folder's files into IntegrityError, and those of
    file systems into EnvironmentFailure. Of files that fail to travel DVC raises how many they are, and logs why."""
    from dvc.exceptions import CheckoutError, DvcException
    from dvc_objects.errors import ObjectFormatError

    with _heard() as causes:
        try:
            yield
        except DvcException as error:
            if causes:
                raise EnvironmentFailure(_told(remote, causes[0])) from error
            if isinstance(error, CheckoutError):
                names = ", ".join(Path(each).name for each in error.target_infos)
                raise kind(f"DVC at {masked(remote)}: {names} is damaged there: push it again") from error
            raise kind(f"DVC at {masked(remote)}: {masked(str(error))}") from error
        except FlexfleetError:
            raise
        except ObjectFormatError as error:
            told = f"DVC at {masked(remote)}: {error}; push it again"
            raise IntegrityError(told) from error
        except sqlite3.Error:  # of the temporary folder, and not of the remote: `_scratch` tells of it
            raise
        except Exception as error:  # the file systems' own
            raise EnvironmentFailure(_told(remote, error)) from error


def _told(remote: str, error: BaseException) -> str:
    return f"DVC at {masked(remote)}: {type(error).__name__}: {masked(str(error))}"


@contextmanager
def _heard() -> Iterator[list[BaseException]]:
    """The errors that DVC logs inside, where nobody else sees them."""
    heard: list[BaseException] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                heard.append(record.exc_info[1])

    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
        logger.propagate, logger.handlers = False, [Ear()]
    try:
        yield heard
    finally:
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate, logger.handlers = propagate, handlers

"""Files and folders in a DVC remote: pushed under the md5 of their content, and fetched by a small pointer.

A pointer is the text of a `.dvc` file; the remote is `publish.dvc`. Every call uses a scratch repository of its own,
because the lock of one repository does not admit two writers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, IntegrityError, masked
from fl_engine.core.system import hashed
from fl_engine.core.text import read_yaml
from fl_engine.data.files import part_of, remove, sweep
from fl_engine.storage.s3 import check_place, setting

LIST = ".dir"
"""End of a folder's sum in DVC, which is the md5 of the list of its files."""
MD5 = re.compile(rf"[0-9a-f]{{32}}({re.escape(LIST)})?")
LOGGERS = ("dvc", "dvc_data", "dvc_objects")
"""These log each failure with a traceback, and raise it too."""

log = logging.getLogger("flexfleet")


def push(paths: Mapping[str, Path], remote: str) -> dict[str, str]:
    """Push files and folders under plain names, and return their pointers.

    Raises:
        ConfigError: The remote is malformed.
        EnvironmentFailure: The remote cannot be reached.
    """
    with _scratch(remote) as (repo, folder):
        for name, path in paths.items():
            if path.is_dir():
                shutil.copytree(path, folder / name)
            else:
                shutil.copyfile(path, folder / name)
        with _explained(remote, EnvironmentFailure):
            repo.add([str(folder / name) for name in paths])
            repo.push(targets=[str(folder / name) for name in paths])
        return {name: (folder / f"{name}.dvc").read_text("utf-8") for name in paths}


def pull(pointers: Mapping[str, str], remote: str, out: Path) -> list[Path]:
    """Fetch what the pointers name into `out`, and replace what is there.

    Raises:
        ConfigError: A text is not a pointer, or the remote is a folder that does not exist.
        IntegrityError: The remote lacks something, or has other content.
    """
    wanted = {name: checksum(text) for name, text in pointers.items()}
    if "://" not in remote and not Path(remote).is_dir():
        raise ConfigError(f"publish.dvc: the folder {place_of(remote)} does not exist")
    with _scratch(remote) as (repo, folder):
        for name, text in pointers.items():
            (folder / f"{name}.dvc").write_text(text, encoding="utf-8")
        with _explained(remote, IntegrityError):
            repo.pull(targets=[str(folder / f"{name}.dvc") for name in pointers])
        fetched = []
        for name, expected in wanted.items():
            if not (folder / name).exists() or (actual := md5(folder / name)) != expected:
                found = f"md5 {actual}" if (folder / name).exists() else "nothing"
                raise IntegrityError(f"{name}: {masked(remote)} has {found}, expected md5 {expected}")
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(folder / name, target)
            fetched.append(target)
        return fetched


def hand_on(path: Path, name: str, remote: str | None, pointer: Path) -> None:
    """Push a step's output, and write its pointer for the following tasks; an empty file if there is no remote."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text("" if remote is None else push({name: path}, remote)[name], encoding="utf-8")


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
            Repo.init(str(folder), no_scm=True).close()
            core = {"analytics": False, "remote": "here", "site_cache_dir": str(folder / ".dvc" / "site")}
            # DVC writes its configuration files in ASCII, so a path with an umlaut cannot be stored in one.
            with Repo(str(folder), config={"core": core, "remote": {"here": _remote(remote)}}) as repo:
                yield repo, folder
        except sqlite3.Error as error:  # of the files in which DVC keeps what it has seen
            raise EnvironmentFailure(f"DVC cannot write into the temporary folder {folder.parent}: {error}") from error


def place_of(remote: str) -> str:
    """The remote's address, or a folder's whole path."""
    return remote if "://" in remote else str(Path(remote).resolve())


def _remote(remote: str) -> dict[str, Any]:
    """The remote's options. With `verify` DVC computes the md5 of what the remote sends."""
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


@contextmanager
def _explained(remote: str, kind: type[FlexfleetError]) -> Iterator[None]:
    """Turn errors of DVC into `kind`, and those of file systems into EnvironmentFailure. If transfers fail, DVC raises
    an error with their number and logs the reasons."""
    from dvc.exceptions import CheckoutError, DvcException
    from dvc_objects.errors import ObjectFormatError

    with _heard() as causes:
        try:
            yield
        except DvcException as error:
            if causes:
                is_missing = isinstance(causes[0], FileNotFoundError)
                raise (kind if is_missing else EnvironmentFailure)(_told(remote, causes[0])) from error
            if isinstance(error, CheckoutError):
                names = ", ".join(Path(each).name for each in error.target_infos)
                raise kind(f"DVC at {masked(remote)}: {names} is missing or damaged there") from error
            raise kind(f"DVC at {masked(remote)}: {masked(str(error))}") from error
        except FlexfleetError:
            raise
        except ObjectFormatError as error:
            raise IntegrityError(f"DVC at {masked(remote)}: {error}") from error
        except sqlite3.Error:  # `_scratch` reports it
            raise
        except Exception as error:  # the file systems' own
            raise EnvironmentFailure(_told(remote, error)) from error


def _told(remote: str, error: BaseException) -> str:
    return f"DVC at {masked(remote)}: {type(error).__name__}: {masked(str(error))}"


@contextmanager
def _heard() -> Iterator[list[BaseException]]:
    """Collect the errors that DVC logs inside, without showing them."""
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


# ------------------------------------------------------------------------------------------------ created once
class Taken(Exception):
    """Another process was quicker."""


@contextmanager
def made_once(path: Path) -> Iterator[Path]:
    """Yield a path to write, which is renamed to `path` if no error is raised inside. Raises Taken if a folder that is
    not empty has that name by then; a file or an empty folder is replaced."""
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
            raise Taken from error
    finally:
        with suppress(OSError):  # it was renamed
            remove(part)

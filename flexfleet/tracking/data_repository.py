"""A data set in a DVC repository: fetched at a revision, or by a .dvc file, into a cache below the data root."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_engine.core.errors import DataError, EnvironmentFailure, FlexfleetError, IntegrityError, masked
from fl_engine.datasets import data_root
from flexfleet.tracking.dvc_remote import Taken, checksum, made_once, md5

REV = re.compile(r"(?P<repo>.+)@(?P<rev>[^@:]+):(?P<path>[^:]+)")

log = logging.getLogger("flexfleet")


def folder_of(root: str | None) -> Path:
    """The folder of a data set's files for `dataset.root`, which is a folder, `repo@rev:path` of a DVC repository, or a
    `.dvc` file. The latter two are first fetched into the cache below the data root.

    Raises:
        DataError: They do not exist.
        EnvironmentFailure: The network or the disk fails.
        IntegrityError: Other content arrives than DVC has recorded.
    """
    try:
        if root is not None and (match := REV.fullmatch(root)) and not Path(root).exists():
            return _at_revision(match["repo"], match["rev"], match["path"])
        if root is not None and root.endswith(".dvc"):
            return _pointed_to(Path(root))
    except OSError as error:
        raise DataError(f"dataset.root = {masked(root or '')[:200]} cannot be read: {error.strerror}") from error
    return data_root(root)


def is_fetched(root: str) -> bool:
    """Whether `folder_of` fetches this `dataset.root`."""
    return (REV.fullmatch(root) is not None and not Path(root).exists()) or root.endswith(".dvc")


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
"""Errors of the system that say that something does not exist, although network and disk work."""


def _not_to_be_had(what: str, error: BaseException) -> FlexfleetError:
    """Name the first error of the chain, which DVC and git wrap into others."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    failed = any(isinstance(each, OSError) and not isinstance(each, NOT_THERE) for each in chain)
    kinds = dict.fromkeys(type(each).__name__ for each in (error, chain[-1]))
    said = f"{what} is not available: {': '.join(kinds)}: {masked(str(chain[-1]))}"
    return EnvironmentFailure(said) if failed else DataError(said)


def _pointed_to(pointer: Path) -> Path:
    """Fetch what a .dvc file of a repository on this machine names, from that repository's remote."""
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
    """Copy a file or folder of a DVC repository to `part`. Raises IntegrityError if its content is not what DVC has
    recorded, which DVC itself does not check."""
    files.get(path, str(part), recursive=True)
    for name in files.find(path):
        # None: the file is in git, or has another kind of sum, such as that of DVC 2, which ignores line ends.
        recorded = (files.info(name).get("dvc_info") or {}).get("md5")
        if recorded is not None and (found := md5(part / os.path.relpath(name, path))) != recorded:
            raise IntegrityError(
                f"{name} has md5 {found}, but {recorded} is recorded. Record the change with dvc add, or delete the "
                "damaged copy from the remote and push it again"
            )


def _cached(name: str, get: Callable[[Path], None]) -> Path:
    """The file or folder of this name in the cache below the data root. `get` creates it if it is missing."""
    cached = data_root() / "dvc" / hashlib.sha256(name.encode()).hexdigest()[:24]
    if not cached.exists():
        with suppress(Taken), made_once(cached) as part:
            get(part)
    return cached

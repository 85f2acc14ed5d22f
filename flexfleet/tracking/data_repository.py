"""A data set kept by DVC: files of a revision of a repository, or of a .dvc file, in a cache below the data root."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fl_engine.core.errors import DataError, EnvironmentFailure, FlexfleetError, IntegrityError, masked
from fl_engine.data.array_cache import INDEX, Seen, seen
from fl_engine.data.files import replacing
from fl_engine.datasets import data_root
from flexfleet.tracking.dvc_remote import Taken, checksum, made_once, md5

REV = re.compile(r"(?P<repo>.+)@(?P<rev>[^@:]+):(?P<path>[^:]+)")

log = logging.getLogger("flexfleet")


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


def is_fetched(root: str) -> bool:
    """Whether `folder_of` fetches this `dataset.root`, and so calls an address."""
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
    with suppress(Taken):
        with made_once(cached) as part:
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

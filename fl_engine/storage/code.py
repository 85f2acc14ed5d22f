"""Send a user's package to clients as a wheel. The SHA-256 of the wheel is verified before the package is imported.

`pack` creates identical bytes from identical files on every machine. In the wheel, names are sorted, times are fixed,
and files are not compressed. `enable` verifies a wheel, and makes Python import the package from the wheel (zipimport).
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import importlib
import io
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fl_engine.core.allowed import OURS, wheels
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.records import read_bytes
from fl_engine.storage.store import sha256

LARGEST = 64 * 2**20
"""Maximum total size of a package's files in bytes."""
LARGEST_WHEEL = 2 * LARGEST
"""Maximum size of a wheel in bytes."""
COMPILED = (".so", ".pyd", ".dll", ".dylib")
LEFT_OUT = ("__pycache__",)
FIXED_TIME = (1980, 1, 1, 0, 0, 0)


def store_key(digest: str) -> str:
    """Return the store key of the wheel with this SHA-256."""
    return f"code/{digest}.whl"


def name_of(source: Path) -> str:
    """Return the import name of a package's folder or of a module's file."""
    return source.resolve().stem if source.is_file() else source.resolve().name


def pack(source: Path) -> bytes:
    """Return a wheel with a package's folder or a module's file. Raises ConfigError if `source` is not valid."""
    name = name_of(source)
    if source.is_dir() and (source / "__init__.py").is_file():
        files = dict(_files(source.resolve()))
    elif source.is_file() and source.suffix == ".py":
        files = {f"{name}.py": source.read_bytes()}
    else:
        raise _wrong(f"must be a folder with an __init__.py, or a .py file, got {source}")
    if not name.isidentifier() or name in (*sys.stdlib_module_names, *OURS):
        raise _wrong(f"must be importable under another name than {name!r}. Rename {source}")
    if (size := sum(map(len, files.values()))) > LARGEST:
        raise _wrong(f"must have at most {LARGEST / 1e6:.0f} MB, {source} has {size / 1e6:.0f} MB")
    return _zipped({**files, **_about(name, files)})


def _wrong(text: str) -> ConfigError:
    return ConfigError.at(f"run.code {text}")


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part in LEFT_OUT or part.startswith(".") for part in inside.parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink() or path.suffix in COMPILED:
            raise _wrong(f"must have Python files and data only, but {path} is a link or compiled code")
        if path.is_file():
            yield f"{folder.name}/{inside.as_posix()}", path.read_bytes()


def _about(name: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    at = f"{name}-0.dist-info"
    texts = {
        f"{at}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n",
        f"{at}/WHEEL": "Wheel-Version: 1.0\nGenerator: flexfleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    out = {path: text.encode() for path, text in texts.items()}
    lines = []
    for path, value in sorted({**files, **out}.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(value).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(value)}\n")
    return {**out, f"{at}/RECORD": "".join([*lines, f"{at}/RECORD,,\n"]).encode()}


def _zipped(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path, value in sorted(files.items()):
            entry = zipfile.ZipInfo(path, FIXED_TIME)
            entry.create_system, entry.external_attr = 3, 0o100444 << 16
            archive.writestr(entry, value)
    return made.getvalue()


_folders: list[str] = []
"""Temporary folders of all wheels. Disabled wheels are included, because they may be enabled again."""


def enable(value: bytes, digest: str, where: str, file: str | None = None) -> None:
    """Make Python import the package from this wheel. Unload modules of the package that were imported from other
    files. `file` is an existing file with the wheel. If `file` is None, write the wheel to a temporary file, which is
    deleted when this process ends. Raises IntegrityError if the wheel does not have the SHA-256 `digest`, and
    ConfigError if an installed package has the wheel's name."""
    if (found := sha256(value)) != digest:
        raise IntegrityError(f"{where} must have the SHA-256 {digest}, got {found}. The package is not imported")
    try:
        with zipfile.ZipFile(io.BytesIO(value)) as archive:
            (about,) = [each for each in archive.namelist() if each.endswith("-0.dist-info/METADATA")]
    except (zipfile.BadZipFile, ValueError) as error:
        raise IntegrityError(f"{where} must be a valid wheel: {error}") from error
    name = about.partition("-0.dist-info/")[0]
    if wheels.get(name, ("", ""))[0] == digest:
        return
    taken = getattr(sys.modules.get(name), "__file__", None)
    if taken is not None and "site-packages" in Path(taken).parts:
        raise _wrong(f"must have another name than {taken}. Rename your package {name!r}")
    disable(name)
    if file is None:
        _folders.append(tempfile.mkdtemp(prefix="flexfleet-code-"))
        path = Path(_folders[-1]) / f"{digest}.whl"
        path.write_bytes(value)
        path.chmod(0o444)
        file = str(path)
    sys.path.insert(0, file)
    importlib.invalidate_caches()
    wheels[name] = digest, file


def disable(name: str | None = None) -> None:
    """Remove a package from Python's path, and unload its modules. If `name` is None, disable all packages."""
    for each in list(wheels) if name is None else [name]:
        _, path = wheels.pop(each, ("", ""))
        if path in sys.path:
            sys.path.remove(path)
        for module in [m for m in sys.modules if m == each or m.startswith(f"{each}.")]:
            del sys.modules[module]


@atexit.register
def clear() -> None:
    """Delete the temporary files of all wheels. Call this function before exec, because exec skips exit handlers."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


@contextmanager
def enabled_within() -> Iterator[None]:
    """Restore the enabled wheels when the block ends: disable new wheels, and enable the previous wheels. Restore the
    modules that a new wheel replaced, because the user's classes belong to these modules."""
    before, modules = dict(wheels), dict(sys.modules)
    try:
        yield
    finally:
        for name in [name for name, wheel in wheels.items() if before.get(name) != wheel]:
            disable(name)
            sys.modules.update({key: each for key, each in modules.items() if key.partition(".")[0] == name})
        for name in before.keys() - wheels.keys():
            wheels[name] = before[name]
            sys.path.insert(0, before[name][1])


def enabled(digest: str) -> bool:
    """Return whether the wheel with this SHA-256 is enabled."""
    return any(known == digest for known, _ in wheels.values())


class Handed:
    """A wheel that is sent to another process on this machine. When this object is unpickled, the wheel is verified and
    enabled. Unpickle this object first, because the classes of other objects may be in the wheel."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = str(path.resolve()), digest

    def __reduce__(self) -> tuple[object, ...]:
        return enable_file, (self._path, self._digest)


def enable_file(path: str, digest: str) -> None:
    """Verify and enable a wheel file. Raises IntegrityError if the file cannot be read."""
    enable(read_bytes(Path(path)), digest, path, path)

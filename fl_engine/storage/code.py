"""A user's package on its way to clients: a wheel that is named by its sha256, and verified before it is imported.

`pack` makes the same bytes of the same files on every machine: names sorted, times fixed, nothing compressed. `enable`
verifies a wheel and lets Python import the package from the file (zipimport). Nothing is pickled.
"""

from __future__ import annotations

import ast
import atexit
import base64
import hashlib
import importlib
import importlib.util
import io
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.allowed import OURS, wheels
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.storage.store import sha256

LARGEST = 64 * 2**20
"""The most bytes of a package's files together."""
LARGEST_WHEEL = 2 * LARGEST
"""The most bytes that are read of its wheel."""
COMPILED = (".so", ".pyd", ".dll", ".dylib")
LEFT_OUT = ("__pycache__",)
FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Wheel:
    value: bytes

    @property
    def sha256(self) -> str:
        return sha256(self.value)


def store_key(digest: str) -> str:
    """Return the key of a wheel in the run's store."""
    return f"code/{digest}.whl"


# --------------------------------------------------------------------------------------------------- making it
def name_of(source: Path) -> str:
    """Return the name under which a package's folder or a module's file is imported."""
    return source.resolve().stem if source.is_file() else source.resolve().name


def pack(source: Path) -> Wheel:
    """Return the wheel of a package's folder, or of a module's file. Raises ConfigError."""
    name = name_of(source)
    if source.is_dir() and (source / "__init__.py").is_file():
        files = dict(_files(source.resolve()))
    elif source.is_file() and source.suffix == ".py":
        files = {f"{name}.py": source.read_bytes()}
    else:
        raise ConfigError(f"run.code must be a folder with an __init__.py, or a .py file, got {source}")
    if not name.isidentifier() or name in (*sys.stdlib_module_names, *OURS):
        raise ConfigError(f"run.code = {source}: {name!r} cannot be a package's name. Rename it")
    if (size := sum(map(len, files.values()))) > LARGEST:
        raise ConfigError(f"run.code must have at most {LARGEST / 1e6:.0f} MB, {source} has {size / 1e6:.0f} MB")
    return Wheel(_zipped({**files, **_about(name, files)}))


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part in LEFT_OUT or part.startswith(".") for part in inside.parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink() or path.suffix in COMPILED:
            raise ConfigError(f"run.code must have Python files and data only, but {path} is a link or compiled code")
        if path.is_file():
            yield f"{folder.name}/{inside.as_posix()}", path.read_bytes()


def _about(name: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that make a zip a wheel (PEP 427)."""
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


# --------------------------------------------------------------------------------------------------- trusting it
def check_content(value: bytes, digest: str, where: str) -> None:
    """Raise IntegrityError unless it is the wheel of this sha256."""
    if (found := sha256(value)) != digest:
        raise IntegrityError(f"{where} is damaged and not imported: its sha256 is {found}, expected {digest}")


# --------------------------------------------------------------------------------------------------- importing it
_folders: list[str] = []
"""The temporary folders of all wheels, also of disabled ones, which may be enabled again."""


def enable(value: bytes, digest: str, where: str, parent: str | None = None) -> None:
    """Make Python import the package from this wheel. Its modules from other files are unloaded. The file is removed
    with the folder `parent`, or at this process' end. Raises IntegrityError for another sha256, ConfigError if the name
    is taken, or a package that it imports is missing."""
    check_content(value, digest, where)
    name = _name_in(value, where)
    if wheels.get(name, ("", ""))[0] == digest:
        return
    taken = getattr(sys.modules.get(name), "__file__", None)
    if taken is not None and "site-packages" in Path(taken).parts:
        raise ConfigError(f"run.code: {name!r} is also the name of {taken}. Rename your package")
    check_dependencies(value, name)
    disable(name)
    if parent is None:
        folder = _folder()
    else:
        Path(parent).mkdir(mode=0o700, exist_ok=True)  # a long run's temporary files may have been deleted
        folder = tempfile.mkdtemp(dir=parent)
    path = Path(folder) / f"{digest}.whl"
    path.write_bytes(value)
    path.chmod(0o444)
    sys.path.insert(0, str(path))
    importlib.invalidate_caches()
    wheels[name] = digest, str(path)


def _folder() -> str:
    """Make a temporary folder, which `clear` removes."""
    folder = tempfile.mkdtemp(prefix="flexfleet-code-")
    _folders.append(folder)
    return folder


def disable(name: str | None = None) -> None:
    """Remove the package, or all packages, from Python's path, and unload their modules."""
    for each in list(wheels) if name is None else [name]:
        _, path = wheels.pop(each, ("", ""))
        if path in sys.path:
            sys.path.remove(path)
        for module in [m for m in sys.modules if m == each or m.startswith(f"{each}.")]:
            del sys.modules[module]


@atexit.register
def clear() -> None:
    """Remove the files of all packages. A process that becomes another one (exec) calls this last, because it runs no
    exit handlers."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


@contextmanager
def enabled_within() -> Iterator[None]:
    """On exit, disable what was enabled inside, and enable what was enabled before."""
    before = dict(wheels)
    try:
        yield
    finally:
        for name in [name for name, wheel in wheels.items() if before.get(name) != wheel]:
            disable(name)
        for name in before.keys() - wheels.keys():
            wheels[name] = before[name]
            sys.path.insert(0, before[name][1])


def enabled(digest: str) -> bool:
    """Whether this process imports from the wheel."""
    return any(known == digest for known, _ in wheels.values())


def _name_in(value: bytes, where: str) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(value)) as archive:
            (about,) = [each for each in archive.namelist() if each.endswith("-0.dist-info/METADATA")]
    except (zipfile.BadZipFile, ValueError) as error:
        raise IntegrityError(f"{where} is not a wheel: {error}") from error
    return about.partition("-0.dist-info/")[0]


def check_dependencies(value: bytes, name: str) -> None:
    """Raise ConfigError, which names all packages that the wheel imports and that are not installed. Imports inside
    functions and conditions (`try`, `if`) are not checked."""
    missing: dict[str, str] = {}
    with zipfile.ZipFile(io.BytesIO(value)) as archive:
        for path in archive.namelist():
            if not path.endswith(".py"):
                continue
            try:
                tree = ast.parse(archive.read(path), path)
            except (SyntaxError, ValueError) as error:
                raise ConfigError(f"run.code: {path} is not valid Python: {error}") from error
            for wanted, line in _imports(tree):
                if wanted not in (name, *missing) and not _is_there(wanted):
                    missing[wanted] = f"{wanted} ({path}, line {line})"
    if missing:
        raise ConfigError(f"run.code: {name} imports what is not installed here: {', '.join(missing.values())}")


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for each in tree.body:
        if isinstance(each, ast.Import):
            yield from ((alias.name.partition(".")[0], each.lineno) for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and not each.level and each.module:
            yield each.module.partition(".")[0], each.lineno


def _is_there(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class Handed:
    """A wheel for another process of this machine. When it is unpickled there, it is verified and enabled, before other
    objects that may be of its classes. The other process imports from a folder of this process, because it may end
    without exit handlers."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest, self._parent = str(path.resolve()), digest, _folder()

    def check(self) -> None:
        """Raise IntegrityError if the file has changed."""
        check_content(_read(self._path), self._digest, self._path)

    def __reduce__(self) -> tuple[object, ...]:
        return enable_file, (self._path, self._digest, self._parent)


def enable_file(path: str, digest: str, parent: str | None = None) -> None:
    """Call `enable` with a file. Raises IntegrityError if it cannot be read."""
    enable(_read(path), digest, path, parent)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error

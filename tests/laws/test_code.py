"""One's own package as a wheel: the same files give the same bytes; nothing but the verified bytes is imported."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.allowed import check_wheel, trust
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.registry import resolve
from fl_engine.storage import code
from fl_engine.storage.store import sha256

NAME = "pack23"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    code.disable()
    assert sys.path == path
    assert not [name for name in set(sys.modules) - modules if name.startswith(NAME)]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / NAME
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("from pack23.deep.inner import VALUE\n")
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "deep" / "inner.py").write_text("VALUE = 1\n\n\nclass Thing:\n    pass\n")
    (folder / "table.csv").write_text("a,b\n")
    return folder


def enable(wheel: bytes) -> None:
    code.enable(wheel, sha256(wheel), "here")


def test_same_files_give_the_same_wheel(package: Path, tmp_path: Path) -> None:
    wheel = code.pack(package)
    elsewhere = tmp_path / "else" / NAME
    elsewhere.mkdir(parents=True)
    for path in sorted(package.rglob("*"), reverse=True):  # made in another order, at another time
        if path.is_file():
            target = elsewhere / path.relative_to(package)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
            os.utime(target, (1e9, 1e9))
    (elsewhere / "__pycache__").mkdir()
    (elsewhere / "__pycache__" / "x.pyc").write_bytes(b"x")
    (elsewhere / ".hidden").write_text("x")
    assert code.pack(elsewhere) == wheel
    (elsewhere / "table.csv").write_text("a,c\n")
    assert code.pack(elsewhere) != wheel


def test_package_is_imported_from_the_newest_wheel(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    first = code.pack(package)
    enable(first)
    found = importlib.import_module(f"{NAME}.deep.inner")
    assert f"{sha256(first)}.whl" in str(found.__file__)
    (package / "deep" / "inner.py").write_text("VALUE = 2\n")
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).VALUE == 1, "the folder has changed, the wheel has not"
    second = code.pack(package)
    enable(second)
    assert importlib.import_module(NAME).VALUE == 2
    assert code.enabled(sha256(second)) and not code.enabled(sha256(first))
    assert sum(entry.endswith(".whl") for entry in sys.path) == 1
    wheels = [Path(entry) for entry in sys.path if entry.endswith(".whl")]
    assert not wheels[0].stat().st_mode & 0o222


@given(place=st.integers(0, 10**6), flipped=st.integers(1, 255))
def test_a_wheel_with_another_byte_is_not_imported(place: int, flipped: int) -> None:
    wheel = code._zipped({f"{NAME}.py": b"", **code._about(NAME, {f"{NAME}.py": b""})})
    value = bytearray(wheel)
    value[place % len(value)] ^= flipped
    with pytest.raises(IntegrityError):
        code.enable(bytes(value), sha256(wheel), "the store")
    assert not code.enabled(sha256(wheel))


def refused(source: Path) -> None:
    with pytest.raises(ConfigError) as error:
        code.pack(source)
    assert error.value.path == "run.code"


def test_only_python_files_and_data_are_packed(package: Path, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nowhere", package / "table.csv"):
        refused(source)
    for name, content in (("fast.so", b""), ("large.bin", bytes(code.LARGEST + 1))):
        (package / name).write_bytes(content)
        refused(package)
        (package / name).unlink()
    (package / "link.py").symlink_to("/etc/hostname")
    refused(package)


@pytest.mark.parametrize("name", ["fl_engine", "flexfleet", "json", "my-package"])
def test_package_with_a_reserved_name_is_refused(package: Path, tmp_path: Path, name: str) -> None:
    refused(package.rename(tmp_path / name))


def test_handed_wheel_is_verified_in_the_other_process(package: Path, tmp_path: Path) -> None:
    """Before what follows it is unpickled, which is of its classes."""
    wheel, path = code.pack(package), tmp_path / "a.whl"
    path.write_bytes(wheel)
    enable(wheel)

    def read() -> Any:
        return pickle.loads(handed)  # noqa: S301 - as a worker process reads what this test has written

    handed = pickle.dumps((code.Handed(path, sha256(wheel)), importlib.import_module(f"{NAME}.deep.inner").Thing()))
    code.disable()
    assert type(read()[1]).__module__ == f"{NAME}.deep.inner"
    assert code.enabled(sha256(wheel))
    code.disable()
    code.clear()  # somebody tidies the temporary files
    assert type(read()[1]).__module__ == f"{NAME}.deep.inner"
    code.disable()
    path.write_bytes(wheel[:-1] + b"x")
    with pytest.raises(IntegrityError):
        read()
    assert NAME not in sys.modules
    path.unlink()
    with pytest.raises(IntegrityError):
        read()


def test_package_that_only_a_file_names_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here9.py").write_text("Net = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "here9", raising=False)
    for act in (lambda: resolve({}, "here9:Net", "model"), lambda: check_wheel("a" * 64)):
        with pytest.raises(ConfigError) as refused:
            act()
        assert refused.value.code == "config.own_code" and "here9" not in sys.modules
    trust("here9:Net")
    assert resolve({}, "here9:Net", "model") == 1


def test_enabled_within_restores_earlier_wheels(package: Path) -> None:
    first = code.pack(package)
    (package / "deep" / "inner.py").write_text("VALUE = 2\n")
    second = code.pack(package)
    with code.enabled_within():
        enable(first)
        assert importlib.import_module(NAME).VALUE == 1
        path = list(sys.path)
        with code.enabled_within():
            enable(second)
            assert importlib.import_module(NAME).VALUE == 2
        assert code.enabled(sha256(first)) and not code.enabled(sha256(second))
        assert sys.path == path and importlib.import_module(NAME).VALUE == 1
    assert not code.enabled(sha256(first)) and NAME not in sys.modules

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

from fl_engine.core.allowed import ALLOWED, check_wheel, trust
from fl_engine.core.errors import ClientError, ConfigError, IntegrityError
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


def enable(wheel: code.Wheel) -> None:
    code.enable(wheel.value, wheel.sha256, "here")


def test_the_same_files_give_the_same_bytes(package: Path, tmp_path: Path) -> None:
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
    assert wheel.sha256 == sha256(wheel.value)
    (elsewhere / "table.csv").write_text("a,c\n")
    assert code.pack(elsewhere).sha256 != wheel.sha256


def test_package_is_imported_from_the_newest_wheel(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    first = code.pack(package)
    enable(first)
    found = importlib.import_module(f"{NAME}.deep.inner")
    assert f"{first.sha256}.whl" in str(found.__file__)
    (package / "deep" / "inner.py").write_text("VALUE = 2\n")
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).VALUE == 1, "the folder has changed, the wheel has not"
    second = code.pack(package)
    enable(second)
    assert importlib.import_module(NAME).VALUE == 2
    assert code.enabled(second.sha256) and not code.enabled(first.sha256)
    assert sum(entry.endswith(".whl") for entry in sys.path) == 1
    wheels = [Path(entry) for entry in sys.path if entry.endswith(".whl")]
    assert not wheels[0].stat().st_mode & 0o222


@given(place=st.integers(0, 10**6), flipped=st.integers(1, 255))
def test_a_wheel_with_another_byte_is_not_imported(place: int, flipped: int) -> None:
    wheel = code.Wheel(code._zipped({f"{NAME}.py": b"", **code._about(NAME, {f"{NAME}.py": b""})}))
    value = bytearray(wheel.value)
    value[place % len(value)] ^= flipped
    with pytest.raises(IntegrityError, match="the store is damaged"):
        code.enable(bytes(value), wheel.sha256, "the store")
    assert not code.enabled(wheel.sha256)


def test_bytes_that_are_no_wheel_are_refused() -> None:
    with pytest.raises(IntegrityError, match="the store is not a wheel"):
        code.enable(b"nothing", sha256(b"nothing"), "the store")


def test_all_that_is_not_installed_is_named_at_once(package: Path) -> None:
    (package / "deep" / "inner.py").write_text(
        "import nowhere23.a\nfrom nothing23 import b\nimport json, torch\nfrom . import c\nfrom pack23 import d\n"
        "try:\n    import maybe23\nexcept ImportError:\n    pass\ndef f():\n    import late23\nVALUE = 1\n"
    )
    wheel = code.pack(package)
    with pytest.raises(ConfigError) as refused:
        enable(wheel)
    assert str(refused.value) == (
        f"run.code: {NAME} imports what is not installed here: nowhere23 ({NAME}/deep/inner.py, line 1), "
        f"nothing23 ({NAME}/deep/inner.py, line 2)"
    )
    assert not code.enabled(wheel.sha256)


def test_what_cannot_travel_is_refused(package: Path, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nowhere", package / "table.csv"):
        with pytest.raises(ConfigError, match=r"run\.code"):
            code.pack(source)
    for name, content in (("fast.so", b""), ("large.bin", bytes(code.LARGEST + 1))):
        (package / name).write_bytes(content)
        with pytest.raises(ConfigError, match=r"run\.code"):
            code.pack(package)
        (package / name).unlink()
    (package / "link.py").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=r"link\.py"):
        code.pack(package)


@pytest.mark.parametrize("name", ["fl_engine", "flexfleet", "json", "my-package"])
def test_package_with_a_reserved_name_is_refused(package: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        code.pack(package.rename(tmp_path / name))


def test_handed_wheel_is_verified_in_the_other_process(package: Path, tmp_path: Path) -> None:
    """Before what follows it is unpickled, which is of its classes."""
    wheel, path = code.pack(package), tmp_path / "a.whl"
    path.write_bytes(wheel.value)
    enable(wheel)

    def read() -> Any:
        return pickle.loads(handed)  # noqa: S301 - as a worker process reads what this test has written

    handed = pickle.dumps((code.Handed(path, wheel.sha256), importlib.import_module(f"{NAME}.deep.inner").Thing()))
    code.disable()
    assert type(read()[1]).__module__ == f"{NAME}.deep.inner"
    assert code.enabled(wheel.sha256)
    code.disable()
    code.clear()  # somebody tidies the temporary files
    assert type(read()[1]).__module__ == f"{NAME}.deep.inner"
    code.disable()
    path.write_bytes(wheel.value[:-1] + b"x")
    with pytest.raises(IntegrityError, match=r"a\.whl is damaged"):
        read()
    assert NAME not in sys.modules
    path.unlink()
    with pytest.raises(IntegrityError, match=r"a\.whl cannot be read"):
        read()


DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("said", "runs"), [(None, True), (DIGEST, True), (f" {'b' * 64} , {DIGEST}", True), ("none", False), ("", False)]
)
def test_an_owner_allows_hashes_or_none(monkeypatch: pytest.MonkeyPatch, said: str | None, runs: bool) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    if said is not None:
        monkeypatch.setenv(ALLOWED, said)
    if runs:
        check_wheel(DIGEST)
    else:
        with pytest.raises(ClientError, match=f"the code {DIGEST} is not allowed on this device"):
            check_wheel(DIGEST)


@pytest.mark.parametrize(
    ("said", "runs"), [(None, True), ("none", False), (f"{'b' * 64},here9", True), ("here", False)]
)
def test_configuration_names_only_what_the_owner_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None, runs: bool
) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    if said is not None:
        monkeypatch.setenv(ALLOWED, said)
    (tmp_path / "here9.py").write_text("Net = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "here9", raising=False)
    trust("here9:Net")
    assert resolve({}, "fl_engine.core.types:Device", "model").__name__ == "Device"  # type: ignore[attr-defined]
    if runs:
        assert resolve({}, "here9:Net", "model") == 1
    else:
        with pytest.raises(ConfigError, match=rf"model 'here9:Net' is not imported on this machine \({ALLOWED} ="):
            resolve({}, "here9:Net", "model")
        assert "here9" not in sys.modules


def test_what_is_enabled_inside_is_gone_afterwards(package: Path) -> None:
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
        assert code.enabled(first.sha256) and not code.enabled(second.sha256)
        assert sys.path == path and importlib.import_module(NAME).VALUE == 1
    assert not code.enabled(first.sha256) and NAME not in sys.modules

"""A data set in a git repository that keeps it by DVC: `dataset.root=repo@rev:path`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fl_engine.core.errors import DataError, EnvironmentFailure, IntegrityError
from flexfleet.tracking import dvc_remote


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository whose tag v1 and whose head keep different data sets by DVC."""
    if shutil.which("git") is None:
        pytest.skip("no git, which makes the repository")
    from dvc.repo import Repo

    folder = tmp_path_factory.mktemp("kept")
    root = folder / "repo"
    root.mkdir()

    def git(*words: str) -> None:
        named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *named, *words], cwd=root, check=True, capture_output=True)

    git("init", "-b", "main")
    repo = Repo.init(str(root))
    with repo.config.edit() as settings:
        settings["remote"] = {"here": {"url": str(folder / "remote")}}
        settings["core"] = {"remote": "here"}
    repo.close()
    for tag, text in (("v1", "one"), ("v2", "two")):
        (root / "set").mkdir(exist_ok=True)
        (root / "set" / "a.txt").write_text(text)
        with Repo(str(root)) as repo:
            repo.add([str(root / "set")])
            repo.push()
        git("add", ".")
        git("commit", "-m", tag)
        git("tag", tag)
    shutil.rmtree(root / "set")
    shutil.rmtree(root / ".dvc" / "cache")
    return root


def test_data_set_is_fetched_by_revision(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLEET_DATA", str(tmp_path))
    old = dvc_remote.folder_of(f"{repository}@v1:set")
    assert (old / "a.txt").read_text() == "one" and old.is_relative_to(tmp_path)
    assert (dvc_remote.folder_of(f"{repository}@main:set") / "a.txt").read_text() == "two"
    (old / "a.txt").touch()
    assert dvc_remote.folder_of(f"{repository}@v1:set") == old, "not fetched twice"
    for root in (f"{repository}@v3:set", f"{repository}@v1:other"):
        with pytest.raises(DataError, match=r"dataset\.root"):
            dvc_remote.folder_of(root)
    assert dvc_remote.folder_of(None) == tmp_path and dvc_remote.folder_of("/some/data") == Path("/some/data")


@pytest.mark.parametrize(
    ("root", "kind"),
    [
        ("{}/nothing@v1:set", DataError),
        ("http://a:secret@127.0.0.1:9/repo@v1:set", EnvironmentFailure),
        ("{}@v1:set", EnvironmentFailure),
    ],
)
def test_failing_network_or_disk_is_told_from_bad_input(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, kind: type[Exception]
) -> None:
    monkeypatch.setenv("FLEXFLEET_DATA", str(tmp_path / ("x" * 300)))  # a name that no disk can hold
    with pytest.raises(kind, match=r"dataset\.root") as told:
        dvc_remote.folder_of(root.format(repository))
    assert "secret" not in str(told.value)


def test_damaged_file_of_a_remote_is_refused(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"{repository}@v2:set"
    monkeypatch.setenv("FLEXFLEET_DATA", str(tmp_path))
    remote, cache = repository.parent / "remote", repository / ".dvc" / "cache"
    sent = next(path for path in remote.rglob("*") if path.is_file() and path.read_bytes() == b"two")
    shutil.rmtree(cache, ignore_errors=True)
    try:
        sent.chmod(0o644)
        sent.write_bytes(b"owt")
        with pytest.raises(IntegrityError, match=r"set/a\.txt"):
            dvc_remote.folder_of(root)
    finally:
        sent.write_bytes(b"two")
        shutil.rmtree(cache, ignore_errors=True)
    assert (dvc_remote.folder_of(root) / "a.txt").read_text() == "two"

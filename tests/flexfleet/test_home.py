"""`~` is the home folder in every path that a user can give."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.core.text import at_home
from flexfleet.config import flatten, load_config
from flexfleet.experiments import tune_storage
from flexfleet.worker.mailbox import folder_of

PATHS = {
    "dataset.root": "~/data",
    "partition.map": "~/map.json",
    "partition.folders": "~/clients",
    "partition.features": "~/features.npy",
    "model.init": "~/model.safetensors",
    "fleet.trace": "~/trace.csv",
    "run.store": "~/x",
    "run.remote": "~/remote",
    "run.secrets": "~/keys",
    "tracking.mlflow": "sqlite:///~/mlflow.db",
    "publish.dvc": "~/dvc",
    "tune.storage": "sqlite:///~/study.db",
    "kubernetes.template": "~/job.yaml",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("name", PATHS)
def test_parameter_with_tilde_names_the_home_folder(name: str, home: Path) -> None:
    local = ("partition.rule=local",) if name == "partition.folders" else ()
    shown = flatten(load_config(None, [*local, f"{name}={PATHS[name]}"]))
    found = shown["fleet.trace.path" if name == "fleet.trace" else name]
    assert found == PATHS[name].replace("~", str(home))


def test_code_with_tilde_is_found_in_the_home_folder(home: Path) -> None:
    (home / "theirs.py").write_text("LEVELS = 3\n")
    assert load_config(None, ["run.code=~/theirs.py"]).run.code == str(home / "theirs.py")


def test_variables_with_tilde_name_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "~/state")
    monkeypatch.setenv("FLEXFLEET_TUNE_STORAGE", "sqlite:///~/study.db")
    assert folder_of("a") == home / "state"
    assert tune_storage.address(load_config(None)) == f"sqlite:///{home}/study.db"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~", "{home}"),
        ("~/möbel/x", "{home}/möbel/x"),
        ("file://~/mlruns", "file://{home}/mlruns"),
        ("sqlite+pysqlite:///~/m.db?timeout=9", "sqlite+pysqlite:///{home}/m.db?timeout=9"),
        ("./~/x", "./~/x"),
        ("s3://bucket/~/x", "s3://bucket/~/x"),
        ("https://host/~user", "https://host/~user"),
        ("a~b", "a~b"),
    ],
)
def test_only_a_leading_tilde_is_the_home_folder(given: str, expected: str, home: Path) -> None:
    assert at_home(given) == expected.format(home=home)


def test_home_of_an_unknown_user_is_refused(home: Path) -> None:
    for setting in ("run.store=~nobody-of-this-name/x", "model.init=~nobody-of-this-name/x"):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [setting])
        assert str(refused.value).startswith(setting.partition(".")[0])

"""Write settings into params.yaml, and return the error of refused settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.config import load_config


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return path


@contextmanager
def refused_at(path: str) -> Iterator[None]:
    """Expect a ConfigError that names this parameter."""
    with pytest.raises(ConfigError) as error:
        yield
    assert error.value.path == path


def refused(*sets: str) -> str:
    """The error of a configuration with these `--set`."""
    with pytest.raises(ConfigError) as error:
        load_config(None, sets)
    return str(error.value)

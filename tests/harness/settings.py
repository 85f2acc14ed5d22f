"""Settings of a test: written into a params.yaml, and what is said where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.config import load_config


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return path


def refused(*sets: str) -> str:
    """The error of a configuration with these `--set`."""
    with pytest.raises(ConfigError) as error:
        load_config(None, sets)
    return str(error.value)

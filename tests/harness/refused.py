"""What is said of settings that are refused."""

from __future__ import annotations

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.config import load_config


def refused(*sets: str) -> str:
    """The error of a configuration with these `--set`."""
    with pytest.raises(ConfigError) as error:
        load_config(None, sets)
    return str(error.value)

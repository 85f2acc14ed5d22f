"""What Python has on Linux and macOS alone."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fl_engine.core.errors import EnvironmentFailure


def of_posix(module: str) -> Any:
    """A module of Python's that is there on Linux and macOS. Raises EnvironmentFailure where the system has none."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentFailure(
            f"training needs Linux or macOS, and this is {sys.platform}, whose Python has no {module}: on Windows "
            "install WSL (wsl --install) and flexfleet in it. Here init, params, list, check and report work"
        ) from error

"""Model-heterogeneous federated learning from Python.

    import flexfleet
    result = flexfleet.run(rounds=5)
    result.history; result.model("M1"); result.report

Names in `__all__` are loaded when they are first used, so `import flexfleet` does not load torch. Import flexfleet
before torch computes anything. The import sets an option of MKL that makes results independent of memory addresses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fl_engine import __version__
from fl_engine.core import system

if TYPE_CHECKING:
    from fl_engine.core.errors import (
        ConfigError,
        DataError,
        EnvironmentFailure,
        FlexfleetError,
        IntegrityError,
        ModelError,
        Stopped,
    )
    from fl_engine.core.samples import Data
    from fl_engine.models.traced import from_module
    from fl_engine.rounds.replay import ClientRound
    from flexfleet.api.array_data import from_arrays, from_clients
    from flexfleet.api.callbacks import STOP, Callback, CSVLogger, EarlyStopping, Round, TensorBoardLogger, WandbLogger
    from flexfleet.api.comparing import Comparison, Paired, compare, load_comparison
    from flexfleet.api.library_data import from_folder, from_huggingface, from_torch
    from flexfleet.api.results import Result, load
    from flexfleet.api.running import run
    from flexfleet.api.tuning import Study, load_study, tune

HOMES = {
    "flexfleet.api.running": ("run",),
    "flexfleet.api.results": ("Result", "load"),
    "flexfleet.api.comparing": ("compare", "Comparison", "Paired", "load_comparison"),
    "flexfleet.api.tuning": ("tune", "Study", "load_study"),
    "flexfleet.api.callbacks": (
        "Callback", "Round", "STOP", "CSVLogger", "EarlyStopping", "TensorBoardLogger", "WandbLogger",
    ),
    "flexfleet.api.array_data": ("from_arrays", "from_clients"),
    "flexfleet.api.library_data": ("from_folder", "from_torch", "from_huggingface"),
    "fl_engine.models.traced": ("from_module",),
    "fl_engine.rounds.replay": ("ClientRound",),
    "fl_engine.core.samples": ("Data",),
    "fl_engine.core.errors": (
        "FlexfleetError", "ConfigError", "DataError", "ModelError", "IntegrityError", "EnvironmentFailure", "Stopped",
    ),
}  # fmt: skip
"""Map each module to the public names that it defines."""
_HOME = {name: module for module, names in HOMES.items() for name in names}

__all__ = [
    "STOP", "CSVLogger", "Callback", "ClientRound", "Comparison", "ConfigError", "Data", "DataError", "EarlyStopping",
    "EnvironmentFailure", "FlexfleetError", "IntegrityError", "ModelError", "Paired", "Result", "Round", "Stopped",
    "Study", "TensorBoardLogger", "WandbLogger", "__version__", "compare", "from_arrays", "from_clients", "from_folder",
    "from_huggingface", "from_module", "from_torch", "load", "load_comparison", "load_study", "run", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flexfleet' has no attribute {name!r}")
    system.check_torch()
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)

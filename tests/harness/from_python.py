"""Keywords of a small run from Python: three hundred of the bundled digits, in a moment."""

from __future__ import annotations

from typing import Any

OPTIONS = {"tracking.mlflow": None, "pretrain.epochs": 1, "dataset.train_samples": 300, "dataset.test_samples": 100}
SMALL: dict[str, Any] = {"clients": 4, "rounds": 1, "local_epochs": 1, "options": OPTIONS, "progress": False}

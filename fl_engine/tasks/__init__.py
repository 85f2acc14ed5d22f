"""The tasks: what a network can learn from samples. A new one is a file here, with a `fl_engine.core.task.Task`."""

from __future__ import annotations

from fl_engine.tasks.classification import Classification
from fl_engine.tasks.detection import Detection
from fl_engine.tasks.next_token import NextToken
from fl_engine.tasks.regression import Regression

__all__ = ["TASKS", "Classification", "Detection", "NextToken", "Regression"]

TASKS: dict[str, type] = {
    "classification": Classification,
    "detection": Detection,
    "next_token": NextToken,
    "regression": Regression,
}

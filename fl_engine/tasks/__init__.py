"""Tasks define targets, loss and metrics. To add a task, implement `fl_engine.core.task.Task` and extend `TASKS`."""

from __future__ import annotations

from fl_engine.tasks.classification import Classification
from fl_engine.tasks.detection import Detection
from fl_engine.tasks.multilabel import Multilabel
from fl_engine.tasks.next_token import NextToken
from fl_engine.tasks.regression import Regression
from fl_engine.tasks.segmentation import Segmentation

__all__ = ["TASKS", "Classification", "Detection", "Multilabel", "NextToken", "Regression", "Segmentation"]

TASKS: dict[str, type] = {
    kind.name: kind for kind in (Classification, Detection, Multilabel, NextToken, Regression, Segmentation)
}

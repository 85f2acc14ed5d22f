"""The model that MLflow serves for a run: predictions of any of its levels. MLflow copies this file into the model.

`predict(images, params={"level": "M2"})`: uint8 images (N, C, H, W) to logits (N, classes); or samples of another shape
and type to the task's outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc import PythonModel

from fl_engine.core.allowed import trust
from fl_engine.models.export import load, read


class AnyLevel(PythonModel):  # type: ignore[misc]
    def load_context(self, context: Any) -> None:
        folders = sorted(Path(context.artifacts["levels"]).iterdir())
        trust([read(folder).model for folder in folders])  # this model brings the network's code with it
        self.networks = {folder.name: load(folder) for folder in folders}

    # Without types: MLflow would make a signature of them, and the model has one.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        level = (params or {}).get("level")
        if level not in self.networks:
            raise ValueError(f"level is one of {', '.join(self.networks)}, got {level!r}")
        with torch.no_grad():
            network = self.networks[level]
            return network(torch.from_numpy(np.asarray(model_input, dtype=network.samples))).numpy()


mlflow.models.set_model(AnyLevel())

"""Define the model class with which MLflow serves the levels of a run. The model predicts with any level. A copy of
this file is stored in the model.

`predict(images, params=dict(level="M2"))` maps uint8 images (N, C, H, W) to logits (N, classes). For all other samples,
`predict` returns the outputs of the task.
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
        trust([read(folder).model for folder in folders])  # trust the network's code, because it is part of the model
        self.networks = {folder.name: load(folder) for folder in folders}

    # Type hints are omitted, because MLflow would infer another signature from them.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        level = (params or {}).get("level")
        if level not in self.networks:
            raise ValueError(f"level must be one of {', '.join(self.networks)}, got {level!r}")
        with torch.no_grad():
            network = self.networks[level]
            return network(torch.from_numpy(np.asarray(model_input, dtype=network.samples))).numpy()


mlflow.models.set_model(AnyLevel())

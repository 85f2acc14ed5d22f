"""Define the model class with which MLflow serves the levels of a run. A copy of this file is stored in the model, next
to an archive of `fl_engine`.

`predict(images, params=dict(level="M2"))` maps uint8 images (N, C, H, W) to logits (N, classes). For all other samples,
`predict` returns the outputs of the task. A model with one level has no parameter `level`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc import PythonModel

sys.path[:0] = map(str, Path(__file__).parent.glob("code/fl_engine.zip"))

from fl_engine.core.allowed import trust  # noqa: E402 - the archive must be on the path
from fl_engine.models.export import ABOUT, load, read  # noqa: E402


class Levels(PythonModel):  # type: ignore[misc]
    def load_context(self, context: Any) -> None:
        root = Path(context.artifacts["levels"])
        folders = [root] if (root / ABOUT).is_file() else sorted(root.iterdir())
        trust([read(folder).model for folder in folders])  # trust the network's code, because it is part of the model
        self.networks = {read(folder).level: load(folder) for folder in folders}

    # Type hints are omitted, because MLflow would infer another signature from them.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        level = (params or {}).get("level", next(iter(self.networks)) if len(self.networks) == 1 else None)
        if level not in self.networks:
            raise ValueError(f"level must be one of {', '.join(self.networks)}, got {level!r}")
        with torch.no_grad():
            network = self.networks[level]
            return network(torch.from_numpy(np.asarray(model_input, dtype=network.samples))).numpy()


mlflow.models.set_model(Levels())

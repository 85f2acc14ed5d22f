"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization (Li et al., ICLR 2021; arXiv:2102.07623).

Algorithm 1: a client keeps the weights, biases and running statistics of its batch-norm layers, and all other
parameters are averaged. With `evaluate.on: clients`, each client evaluates its own model on its held-out samples.

Departs from the paper, in which all clients train in each round. Here only the selected clients train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn.modules.batchnorm import _BatchNorm

from fl_engine.algorithms.fedper import FedPer
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import blank, full_shapes
from fl_engine.core.types import Pool


@dataclass(frozen=True)
class FedBN(FedPer):
    """FedBN: each client keeps its batch-norm layers, and the other layers are averaged (Li et al., ICLR 2021)."""

    def client_state(self, family: ModelFamily, pool: Pool) -> Mapping[str, tuple[int, ...]]:
        modules = blank(family).named_modules()
        norms = tuple(f"{name}." for name, module in modules if isinstance(module, _BatchNorm))
        if not norms:
            raise ModelError(f"FedBN requires a network with batch norm, got {type(family).__name__}")
        return {name: tuple(shape) for name, shape in full_shapes(family).items() if name.startswith(norms)}

"""Federated Dropout: Expanding the Reach of Federated Learning by Reducing Client Resource Requirements (Caldas et al.,
2018; arXiv:1812.07210), as implemented in FedRolex's comparison (thesis ch. 3, Eq. 3.5).

A client of capacity beta trains floor(beta * K_i) random channels of each layer i. New channels are drawn for every
client and round. As in FedRolex's code, two convolutions keep the same channels only if a shortcut adds their outputs.
Each parameter is averaged over the updates that contain it. The output layer is never cut. Only the full model is
evaluated.

Departs from the paper: the paper's lossy compression is left out, as in FedRolex's comparison. A device trains a random
part of the received model if the model does not fit into its free memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import MovingWidths
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core import seeds
from fl_engine.core.types import Assignment, RoundContext, SubmodelSpec, TaskContext
from fl_engine.core.widths import random_drop


@dataclass(frozen=True)
class FederatedDropout(MovingWidths):
    def submodel(self, state: PooledState, context: RoundContext, client: int, level: int) -> SubmodelSpec:
        rng = seeds.rng(context.seed, "dropout", context.round, client)
        return random_drop(state.layout, self.widths[level], rng)

    def part(self, assignment: Assignment, ctx: TaskContext, width: float) -> SubmodelSpec:
        return random_drop(ctx.layout, width, seeds.rng(assignment.seed, "shrink"), inside=assignment.spec)

"""FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction (Alam et al., NeurIPS 2022;
arXiv:2212.01548; thesis ch. 3).

A client of capacity beta trains a window of floor(beta * K_i) channels of each layer i. The window moves by one channel
per round and wraps around at the end of the layer, so all channels are trained equally often (Eq. 3.4). Each parameter
is averaged over the updates that contain it, with equal weights (Eq. 3.10). The output layer is never cut. If all
widths are below 1, the server's model is larger than every client's model.

Departs from the paper:

- A device trains a part of the received window if the window does not fit into its free memory. In the paper capacities
  are fixed. If beta * K_i is below 1, a layer keeps one channel.
- The default widths suit flexfleet's default fleet. The paper uses 1/16, 1/8, 1/4, 1/2 and 1 (fleet `capacities`).
- `weighting: updates` weights a client by the number of its local steps. The paper weights by the "number of updates",
  and the authors' code counts how often each parameter was updated.
- The authors' code moves the window backwards and rounds channel numbers up. The implementation follows the paper.
- The authors' code redraws every client's capacity in every round (`dynamic`). Here each device has a constant
  capacity, as in the paper. The options `selection: {name: uniform, model: random}` and `fleet.tiers: [{name: any,
  share: 1, memory: 125}]` reproduce the code's dynamic capacities.

As in the paper, only the full model is evaluated. `mask_labels` masks the output layer as in the authors' code. The
options `static_bn` and `scaler` have the same effect as in HeteroFL.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.algorithms.levels import MovingWidths
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core.fields import Share
from fl_engine.core.types import Assignment, ParamLayout, RoundContext, SubmodelSpec, TaskContext
from fl_engine.core.widths import rolling, window_start


@dataclass(frozen=True)
class FedRolex(MovingWidths):
    overlap: Share = 1.0
    """Overlap r (Sec. 3.3.7): the window moves by 1 + floor(beta * (1 - r) * K_i) channels per round. If r < 1 and this
    step divides K_i, some channels may never be trained."""

    def submodel(self, state: PooledState, context: RoundContext, client: int, level: int) -> SubmodelSpec:
        return self._window(state.layout, self.widths[level], self.widths[level], context.round)

    def part(self, assignment: Assignment, ctx: TaskContext, width: float) -> SubmodelSpec:
        return self._window(ctx.layout, self.widths[assignment.level], width, assignment.round)

    def _window(self, layout: ParamLayout, sent: float, width: float, round: int) -> SubmodelSpec:
        """Return this round's window for the capacity `sent`, shortened to the width ratio `width`."""
        return rolling(layout, width, window_start(layout, sent, round, self.overlap))

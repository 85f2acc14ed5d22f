"""Drop updates that make the model worse on the server's own data, before another aggregation merges the others.

Zeno (Xie et al., Zeno: Distributed Stochastic Gradient Descent with Suspicion-based Fault-tolerance, ICML 2019,
arXiv:1805.10032, Definition 2) ranks updates by the loss on a few samples of the server. The score of an update is

    score = (loss(weights that were sent) - loss(weights of the update)) / loss(weights that were sent).

Both losses are computed with the assignment's sub-model. With the round's median score m, an update is dropped if its
score is below m - MARGIN * |m| and below -1, so that it more than doubles the loss. The score of an honest update is
often negative, because a client's data differ from the server's data, but most honest scores are similar. A harmful
update multiplies the loss by 3 to 60.

Departs from the paper: In Zeno, scores are not relative, because all clients train the same model. Zeno also subtracts
a term for the length of the update, which `rounds.norm_bound` limits here. Zeno merges a fixed number of updates with
the highest ranks, so it requires an upper bound for the number of Byzantine clients. As in Zeno++ (ICML 2020,
arXiv:1903.07020), a threshold replaces this number.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from fl_engine.aggregation.rules import Dropping, Received, Scores
from fl_engine.core.clients import LARGEST_LOSS
from fl_engine.core.contracts import Algorithm, KeepsClientState, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count, Options
from fl_engine.core.slicing import put
from fl_engine.core.types import ParamLayout

MARGIN = 3.0
"""A smaller margin, and a limit closer to 0 than -1, drop more honest updates of clients with rare classes."""


class WithServerData(Options):
    """Base class of aggregations for which the server tests each update with its own data."""

    name: str

    def check(self, algorithm: Algorithm, server: ServerContext) -> None:
        if isinstance(algorithm, KeepsClientState):
            raise ConfigError.at(
                f"algorithm.aggregation cannot be {self.name}, because the server cannot test updates without the "
                "parameters that the clients keep. Choose median or trimmed_mean"
            )
        try:
            server.data  # noqa: B018
        except ConfigError as error:
            raise ConfigError(
                f"algorithm.aggregation cannot be {self.name}, because the server cannot test updates without data: "
                f"{error}",
                path="partition.proxy",
            ) from error


@dataclass(frozen=True)
class Judged(WithServerData, Dropping):
    """Drop updates that make the model worse on the server's data (after Zeno, ICML 2019), and merge the others."""

    name: Literal["judged"] = "judged"
    samples: Count = 256
    """Maximum number of the server's samples on which updates are judged."""

    def scores(self, updates: Received, layout: ParamLayout, server: ServerContext, algorithm: Any) -> Scores:
        before: dict[int, float] = {}
        """Map the ID of each payload to its loss. The clients of a level usually share a payload."""
        found = {}
        for assignment, update in updates:
            sent = id(assignment.payload)
            if sent not in before:
                before[sent] = server.loss(assignment.spec, assignment.payload, self.samples)
            weights = put(update.payload, layout, update.spec, assignment.payload, assignment.spec)
            gain = before[sent] - server.loss(assignment.spec, weights, self.samples)
            score = gain / max(abs(before[sent]), 1e-9)
            found[update.client] = -LARGEST_LOSS if math.isnan(score) else max(score, -LARGEST_LOSS)
        return found

    def lowest(self, scores: Scores) -> float:
        median = statistics.median_high(scores.values())  # if half of the clients are Byzantine, an honest score
        return min(median - MARGIN * abs(median), -1.0)

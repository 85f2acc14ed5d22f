"""FLTrust: weight each update by its similarity to the server's own training.

Cao, Fang, Liu and Gong, FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021,
arXiv:2012.13995, Algorithm 2. The server trains on its own samples like a client. With the server's change g0 and the
changes g_m of the updates, the new model is

    old + sum_m t_m * |g0| / |g_m| * g_m / sum_m t_m        t_m = max(0, cos(g_m, g0)).

An update that points away from the server's change is dropped, and no update moves the model further than the server
does. The weight of a client does not depend on its number of samples.

Departs from the paper, in which every client trains the whole model. Here the server trains each sub-model that the
round's updates contain, because the whole model's change differs from a sub-model's change on the same elements. The
server trains once per sub-model, on at most `samples` samples, with the options of `algorithm.training`, but without
early-exit losses and distillation. The cosine and both lengths are computed on the elements of the update, without
running statistics. Each element is averaged over its holders, the updates that contain the element. With few
holders, the rule is the same. If only one client holds an element, the element moves by this client's scaled change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from fl_engine.aggregation.averaging import StreamingMean, change_of, scaled
from fl_engine.aggregation.judged import WithServerData
from fl_engine.aggregation.privacy import Public
from fl_engine.aggregation.rules import Received, Scores
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Count
from fl_engine.core.slicing import all_classes, is_statistic, take
from fl_engine.core.types import ParamLayout, Params, SubmodelSpec

LOWEST = 1e-6
"""Smallest cosine of an update that is merged."""


@dataclass(frozen=True)
class FLTrust(WithServerData):
    """Weight updates by their similarity to the server's own training, and give all updates the length of the server's
    change (FLTrust, NDSS 2021)."""

    name: Literal["fltrust"] = "fltrust"
    samples: Count = 256
    """Maximum number of the server's samples for training."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> TrustedMean:
        return TrustedMean(old, layout, public, self.samples)

    def scores(self, updates: Received, layout: ParamLayout, server: ServerContext, algorithm: Any) -> Scores:
        found = {}
        for assignment, update in updates:
            whole = all_classes(update.spec)
            start = take(assignment.payload, layout, whole, have=assignment.spec)
            trained = algorithm.reference(server, assignment.round, whole, start, self.samples)
            before, after = (take(params, layout, update.spec, have=whole) for params in (start, trained))
            found[update.client] = compared(update.payload, before, after)[0]
        return found

    def lowest(self, scores: Scores) -> float:
        return LOWEST


class TrustedMean(StreamingMean):
    """Mean of the scaled updates, weighted by their cosines. Raises ConfigError if the algorithm does not train on the
    server."""

    def __init__(self, old: Params, layout: ParamLayout, public: Public, samples: int) -> None:
        if public.reference is None:
            raise ConfigError.at(
                "algorithm.aggregation cannot be fltrust, because the algorithm does not set Public.reference. Derive "
                "the algorithm from PooledAlgorithm, or choose another aggregation"
            )
        super().__init__(old, layout)
        self._layout, self._reference, self._samples = layout, public.reference, samples

    def add(self, payload: Params, spec: SubmodelSpec, weight: float) -> None:
        """Add an update. `weight` is ignored."""
        kind, whole = self._regions.fit(payload, spec), all_classes(spec)
        start = take(self._old, self._layout, whole)
        trained = take(self._reference(whole, start, self._samples), self._layout, spec, have=whole)
        trust, factor = compared(payload, take(start, self._layout, spec, have=whole), trained)
        if trust >= LOWEST:
            super().add(scaled(payload, kind, self._old, self._regions, factor), spec, trust)


def compared(payload: Params, before: Params, trained: Params) -> tuple[float, float]:
    """Return the cosine between the update's change and the server's change, and the ratio of their lengths (server
    divided by update). Return (0, 0) if a change has the length 0."""
    dot = own = servers = 0.0
    for name, tensor in payload.items():
        if not is_statistic(name):
            change, reference = (change_of(each, before[name]).flatten() for each in (tensor, trained[name]))
            dot += float(change @ reference)
            own += float(change @ change)
            servers += float(reference @ reference)
    if not own or not servers:
        return 0.0, 0.0
    return dot / math.sqrt(own * servers), math.sqrt(servers / own)

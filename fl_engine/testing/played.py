"""Rounds of an algorithm as its suite plays them: without a backend, or in this process with a ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from fl_engine.backends import InProcess
from fl_engine.core.clients import client_metrics
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.errors import ClientError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import take
from fl_engine.core.state import pack
from fl_engine.core.types import ClientUpdate, Outcome, Params, RoundPlan, SubmodelSpec, TaskContext
from fl_engine.exchange.client import Site, execute
from fl_engine.rounds import loop
from fl_engine.rounds.collect import Heard, nobody_listens
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore, Store
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import SEED, Memory, assert_same_bits, brought, context_of, start_of, update_of
from fl_engine.training.evaluation import evaluate, published, weights_of

LARGEST_R = 200.0
"""More than any device has free, in % of the full model."""


def federated(run: Run, store: Store, backend: Backend | None = None, **more: Any) -> tuple[Any, list[Row]]:
    """The state that a run (or the rest of it) with its ledger in this store ends with, and what its rounds measured;
    in this process, unless a backend is given. `more`: what `loop.federate` takes besides."""
    ledger = ledger_in(store, run.terms.keep_every, replace(run.site.rules, algorithm=run.algorithm))
    start, backend = start_of(run.algorithm, run.site), backend or InProcess(run.site)
    return loop.federate(run, start, backend, ledger, Memory(), **more), list(ledger.checkpoints.rows())


def ending(
    algorithm: Algorithm, site: Site, folder: Path, stop: int, keep_updates: bool, heard: Heard = nobody_listens
) -> Params:
    """The weights with which such a run ends in this folder."""
    terms = RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, keep_updates=keep_updates)
    return dict(published(federated(Run(algorithm, site, terms), FolderStore(folder), heard=heard)[0]))


def for_task(algorithm: Algorithm, data: Data) -> Algorithm:
    """Without the label masks of HeteroFL where the outputs are no classes."""
    options: Any = algorithm
    masks = getattr(algorithm, "mask_labels", False) and not isinstance(data.task, Classification)
    return replace(options, mask_labels=False) if masks else algorithm


def copied(params: Params) -> Params:
    return {name: t.clone() for name, t in params.items()}


def snapshot(state: Any) -> tuple[Params, str]:
    tensors, rest = pack(state)
    return {name: tensors[name].clone() for name in sorted(tensors)}, json.dumps(rest, sort_keys=True)


def assert_same_snapshot(left: tuple[Params, str], right: tuple[Params, str]) -> None:
    assert_same_bits(left[0], right[0])
    assert left[1] == right[1]


def task_context(site: Site, client: int, observed: float) -> TaskContext:
    return TaskContext(site.family.layout(), site.pool, site.fleet[client], observed)


def task_or_none(algorithm: Algorithm, order: Any, context: TaskContext) -> Any:
    try:
        return algorithm.task(order, context)
    except ClientError:
        return None


def outcomes_of(
    algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject, noise: bool = True
) -> tuple[RoundPlan, list[Any]]:
    """A plan and an update for each of its orders, of a sub-model that its client might have trained."""
    plan = algorithm.plan(state, context_of(site, round, SEED))
    layout = site.family.layout()
    generator = torch.Generator().manual_seed(round)
    updates = []
    for order in plan.orders:
        observed = data.draw(st.floats(0, LARGEST_R), label="free")
        task = task_or_none(algorithm, order, task_context(site, order.client, observed))
        spec: SubmodelSpec = order.spec if task is None else task.spec
        payload = copied(take(order.payload, layout, spec, have=order.spec))
        if noise:
            payload = {n: t + torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in payload.items()}
        update = update_of(order, spec, payload, data.draw(st.integers(1, 1000), label="examples"))
        said = {m.name: data.draw(st.floats(m.low, m.high), label=m.name) for m in client_metrics(algorithm)}
        updates.append(brought(replace(update, metrics={**update.metrics, **said}), site))
    return plan, updates


def played(algorithm: Algorithm, site: Site, state: Any, rounds: int) -> tuple[Any, list[Outcome]]:
    """Rounds without a backend, a ledger or anything else around them."""
    seen: list[Outcome] = []
    for round in range(rounds):
        plan = replace(algorithm.plan(state, context_of(site, round, SEED)), noise_seed=bytes(32))
        found = [execute(algorithm, order, site) for order in sorted(plan.orders, key=lambda o: o.client)]
        outcomes = [brought(o, site) if isinstance(o, ClientUpdate) else o for o in found]
        state = algorithm.merge(state, plan, outcomes, ServerSite(site))
        seen += outcomes
    return state, seen


def train_loss(site: Site, found: Params) -> float:
    """Of what is `published`: mean over the reported pool members, on all training data."""
    d, layout, reported = site.data, site.family.layout(), [m for m in site.pool if m.reported]
    losses = []
    for m in reported:
        weights = weights_of(found, layout, m)
        score = evaluate(site.family, weights, m.spec, d, d.train_x, d.train_y, ensemble=m.ensemble)
        losses.append(score.loss)
    return sum(losses) / len(losses)

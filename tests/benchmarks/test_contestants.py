"""The benchmarks compare like with like: the naive loop ends in flexfleet's model, given the same order of samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from benchmarks import __main__ as harness
from benchmarks import naive, ours
from benchmarks.workloads import WORKLOADS
from fl_engine.backends import InProcess
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import FULL, Assignment, ClientResult, ClientUpdate, Params, RoundPlan, SubmodelSpec
from fl_engine.exchange.client import execute
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import Memory, context_of, start_of, tiny_pool
from fl_engine.training.losses import self_distillation
from fl_engine.training.numerics import Numerics
from tests.harness.networks import Watched
from tests.harness.stores import MemoryStore


def assignment_of(assignment: Assignment, samples: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seeds.derive(assignment.seed, "order"))
    return [torch.randperm(samples, generator=generator)]


def positional(params: Params, names: list[str]) -> Params:
    """The same tensors under the names of another implementation of the network."""
    return dict(zip(names, params.values(), strict=True))


def assert_close(left: Params, right: Params) -> None:
    for (name, a), b in zip(left.items(), right.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


def without_dropout(net: nn.Module) -> nn.Module:
    """Return the network without dropout, whose masks each implementation draws itself."""
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return net


class NoDropout(Watched):
    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        return without_dropout(self.inner.module(spec))


@pytest.mark.parametrize(("name", "samples"), [("W1", 100), ("W2", 10), ("W3", 40), ("W5", 10), ("W6", 70), ("W7", 70)])
def test_a_client_of_the_naive_loop_learns_what_ours_does(name: str, samples: int) -> None:
    w = replace(WORKLOADS[name], samples=samples)
    algorithm, site = ours.site_of(name, w)
    site = replace(site, family=NoDropout(site.family))
    start = initial_params(site.family, ours.SEED)
    state = start_of(algorithm, site, start)
    assignment = algorithm.plan(state, context_of(site, 0, ours.SEED)).assignments[0]
    update = execute(algorithm, assignment, site)
    assert isinstance(update, ClientUpdate)

    client = naive.Client(w, naive.plan_of(name, w))
    client.nets = [without_dropout(net) for net in client.nets]
    net = 0 if w.algorithm == "fedavg" else [m.spec for m in site.pool].index(update.spec)
    names = list(client.nets[net].state_dict())
    weights = positional(take(start, site.family.layout(), update.spec), names)
    found = client.train(naive.Pick(assignment.client, net), weights, assignment_of(assignment, samples))
    assert_close(found, update.payload)
    assert not torch.equal(next(iter(found.values())), next(iter(weights.values())))


def test_a_round_of_the_naive_loop_is_ours() -> None:
    """A hundred clients of W3 side by side, merged, against one after the other, averaged."""
    w = WORKLOADS["W3"]
    algorithm, site = ours.site_of("W3", w, Numerics("batched", 100))
    start = initial_params(site.family, ours.SEED)
    state = start_of(algorithm, site, start)
    plan = algorithm.plan(state, context_of(site, 0, ours.SEED))
    merged = algorithm.merge(
        state, plan, sorted(InProcess(site).run(algorithm, plan), key=lambda o: o.client), ServerSite(site)
    ).params

    client = naive.Client(w, naive.plan_of("W3", w))
    weights = positional(start, list(client.nets[0].state_dict()))
    updates = (client.train(naive.Pick(o.client), weights, assignment_of(o, w.samples)) for o in plan.assignments)
    assert_close(naive.average(weights, updates), merged)


@pytest.mark.parametrize("name", ["W4", "W5"])
def test_the_naive_loop_does_the_rounds_of_a_run(name: str) -> None:
    """Also when the selection has learned (AdaptiveFL's): the same clients train the same levels, here of a narrow
    network on few samples."""
    w = replace(WORKLOADS[name], samples=2, batch=2)
    algorithm, wide = ours.site_of(name, w)
    family = replace(wide.family, width=0.1)  # type: ignore[type-var]
    site = replace(wide, family=family, pool=tiny_pool(algorithm, family))
    specs, seen = [m.spec for m in site.pool], list[list[tuple[int, int]]]()

    class Seen(InProcess):
        def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
            outcomes = sorted(super().run(algorithm, plan), key=lambda each: each.client)
            seen.append([(each.client, specs.index(each.spec)) for each in outcomes if isinstance(each, ClientUpdate)])
            return iter(outcomes)

    run = Run(algorithm, site, RoundsConfig(stop=6, evaluate_every=10**9))
    initial = algorithm.init(initial_params(family, ours.SEED), site.layout, site.fleet, site.pool, run.server)
    rounds.federate(run, initial, Seen(site), Ledger(MemoryStore(), None), Memory())

    picks = islice(naive.plan_like(algorithm, site).rounds, 6)
    assert [[(pick.client, pick.net) for pick in of_round] for of_round in picks] == seen
    assert [len(of_round) for of_round in seen] == [w.per_round] * 6


def test_the_naive_loop_distils_like_ours() -> None:
    """The same teachers with the weights of the step; dropout is off, its masks are everyone's own."""
    w = replace(WORKLOADS["W4"], samples=50)
    algorithm, site = ours.site_of("W4", w)
    site = replace(site, family=replace(site.family, width=0.1))
    site = replace(site, pool=tiny_pool(algorithm, site.family))
    state = start_of(algorithm, site)
    x = torch.rand(10, *w.shape)
    specs = [m.spec for m in site.pool]
    nets = [site.family.module(spec).eval() for spec in specs]
    for net, spec in zip(nets, specs, strict=True):
        net.load_state_dict(take(state.params, site.family.layout(), spec))
    client = naive.Client(replace(w, clients=1, samples=1), naive.Plan(nets, iter(()), kd_weight=10.0))
    logits = nets[-1](x)
    soft = [net(x) for net in nets[:-1]]
    found = client.distil(nets[-1], nets[:-1], logits, x)
    torch.testing.assert_close(
        found, self_distillation(Classification(logits.shape[1]), logits, soft, naive.TEMPERATURE).mean()
    )


def test_the_harness_lets_them_take_turns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["W3", "--json", "--turns", "2", "--seconds", "0.2", "--samples", "10", "--against", "naive,flower"]
    monkeypatch.setitem(WORKLOADS, "W3", replace(WORKLOADS["W3"], peers=("naive",)))
    assert harness.main(argv) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["workload"] == "W3"
    assert set(found["peers"]) == set(found["ratios"]) == {"naive"}
    assert found["ratios"]["naive"] == pytest.approx(found["peers"]["naive"] / found["ours_s"])
    assert 0 < found["peak_share"] < 1
    assert set(found["cpu_s"]) == {"ours", "naive"} and min(found["cpu_s"].values()) > 0
    assert "flower does not run W3" in captured.err
    assert "GFLOP/s" in captured.err

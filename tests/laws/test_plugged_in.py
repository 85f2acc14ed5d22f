"""What a configuration chooses by name: registered things and one's own, and why something is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import pytest
import torch

from fl_engine.aggregation.privacy import Private, Public
from fl_engine.aggregation.rules import Aggregate, Middle
from fl_engine.aggregation.server_opt import Average
from fl_engine.algorithms import ALGORITHMS, FedAvg
from fl_engine.core.augmentation import Flip
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.task import Task
from fl_engine.core.types import ParamLayout, Params
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Uniform
from fl_engine.testing.tiny import TRAINING, assert_same_bits, context_of, start_of, tiny_site, update_of
from flexfleet import config as configs
from flexfleet.config import load_config

HERE = __name__


@dataclass(frozen=True)
class Trimmed:
    share: float = 0.1
    bounds: tuple[float, ...] = ()

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return Middle(old, layout, self.share)


@dataclass(frozen=True)
class Half:
    __pydantic_config__ = STRICT
    share: Positive = 0.5

    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        return {}, {name: torch.lerp(old[name], mean[name], self.share) for name in old}


@dataclass(frozen=True)
class Everybody(Uniform):
    extra: int = 0


@dataclass(frozen=True)
class HalfAverage(Average):
    def step(self, moments: Params, old: Params, mean: Params, trained: Params) -> tuple[Params, Params]:
        return Half().step(moments, old, mean, trained)


@dataclass(frozen=True)
class Quiet(Private):
    def start(self, old: Params, layout: ParamLayout, public: Public) -> Any:
        return Middle(old, layout, 0.0)


@dataclass(frozen=True)
class NoStart:
    share: float = 0.1


@dataclass(frozen=True)
class Backwards:
    def check(self, goal: Task) -> None:
        pass

    def epoch(self, goal: Task, y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.arange(len(y)).flip(0)


@dataclass(frozen=True)
class Darker:
    by: tuple[float, ...] = (0.5,)

    def check(self, x: torch.Tensor) -> None:
        pass

    def apply(
        self, x_bchw: torch.Tensor, y: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x_bchw * self.by[0], y


@dataclass(frozen=True)
class Falling:
    factor: float = 0.5

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        return lr * self.factor**step


OWN_WORK = (
    f"training.sampler.name={HERE}:Backwards",
    f"training.augment=[{{name: flip, share: 0.25}}, {{name: '{HERE}:Darker', by: [0.25]}}]",
    f"training.schedule={{name: '{HERE}:Falling', factor: 0.75}}",
)


def function(old: Params) -> Params:
    return old


def configured(*sets: str, name: str = "heterofl") -> Any:
    return configs.algorithm(load_config(None, [f"algorithm.name={name}", *sets]))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_takes_ones_own(name: str) -> None:
    aggregation = (
        f"algorithm.aggregation.name={HERE}:Trimmed",
        "algorithm.aggregation.share=0.3",
        "algorithm.aggregation.bounds=[0.5, 1.0]",
    )
    own: dict[str, tuple[tuple[str, ...], object]] = {
        "aggregation": (aggregation, Trimmed(share=0.3, bounds=(0.5, 1.0))),
        "server": ((f"algorithm.server={{name: {HERE}:Half, share: 0.25}}",), Half(share=0.25)),
        "selection": (
            (f"algorithm.selection={{name: {HERE}:Everybody, model: largest, extra: 3}}",),
            Everybody(model="largest", extra=3),
        ),
    }
    chosen = [each.name for each in fields(cast(Any, ALGORITHMS[name])) if each.name in own]
    built = configured(*OWN_WORK, *(each for what in chosen for each in own[what][0]), name=name)
    assert chosen and all(getattr(built, what) == own[what][1] for what in chosen)
    training = built.training
    if getattr(ALGORITHMS[name], "local_work", None) is None:  # FedSGD takes all samples at once
        assert training.sampler == Backwards()
    assert training.augment == (Flip(share=0.25), Darker(by=(0.25,)))
    assert training.schedule == Falling(factor=0.75)


def test_what_is_plugged_in_is_what_merges() -> None:
    algorithm = configured(f"algorithm.aggregation={{name: {HERE}:Trimmed, share: 0.0}}", name="fedopt")
    algorithm = FedAvg(training=TRAINING, eligible="all", aggregation=algorithm.aggregation, server=Average())
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0, 7))
    updates = [update_of(o, o.spec, {n: t + o.client for n, t in o.payload.items()}) for o in plan.assignments]
    whole = algorithm.merge(state, plan, updates, ServerSite(site))
    for server in (Half(), HalfAverage()):
        half = FedAvg(training=TRAINING, eligible="all", aggregation=Trimmed(share=0.0), server=server).merge(
            state, plan, updates, ServerSite(site)
        )
        assert_same_bits(half.params, {n: torch.lerp(t, whole.params[n], 0.5) for n, t in state.params.items()})


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("{name: NoStart}", r"aggregation\.name: .*start"),
        ("{name: function}", r"aggregation\.name"),
        ("{name: Nothing}", r"aggregation\.name"),
        ("{name: Trimmed, shore: 1}", r"aggregation\.shore.*share"),
        ("{name: Trimmed, share: much}", r"aggregation\.share"),
        ("{name: Trimmed, bounds: [1.0, x]}", r"aggregation\.bounds\.1"),
    ],
)
def test_wrong_own_aggregation_is_refused_with_its_path(section: str, path: str) -> None:
    with pytest.raises(ConfigError, match=path) as error:
        configured(f"algorithm.aggregation={section.replace('name: ', f'name: {HERE}:')}")
    assert "\n" not in str(error.value)


def test_subclass_of_private_aggregation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Quiet.*algorithm\.aggregation\.name=private"):
        configured(f"algorithm.aggregation={{name: {HERE}:Quiet}}", "rounds.norm_bound=null")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("sampler={name: balance}", "training.sampler.name"),
        ("sampler={name: balanced, share: 1}", "training.sampler.share"),
        ("augment=[{name: flip}, {name: crop, padding: 0}]", "training.augment.1.padding"),
        ("augment={name: flip}", "training.augment"),
        ("schedule={name: cosine, flor: 0.1}", "training.schedule.flor"),
        ("schedule={name: cosine, floor: 1.5}", "training.schedule.floor"),
        (f"schedule={{name: '{HERE}:Backwards'}}", "schedule '.*:Backwards'"),
    ],
)
def test_wrong_client_work_is_refused_with_its_path(given: str, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_config(None, [f"training.{given}"])

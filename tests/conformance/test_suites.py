"""What the suites are for: each notices what breaks one of its laws."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_engine.algorithms import DepthFL, HeteroFL
from fl_engine.backends import InProcess
from fl_engine.core.contracts import Algorithm, Interval
from fl_engine.core.fields import STRICT, NotNegative, Positive
from fl_engine.core.types import FULL, ClientUpdate, Header, Outcome, Params, Pool, RoundPlan, SubmodelSpec
from fl_engine.datasets import digits
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.backends import BackendSuite
from fl_engine.testing.codecs import CodecSuite
from fl_engine.testing.datasets import DatasetSuite
from fl_engine.testing.models import ModelSuite
from fl_engine.testing.plugins import PersonalHeads
from fl_engine.testing.tiny import TinyNet


class LosesMemory(InProcess):
    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        return super().run(algorithm, replace(plan, orders=tuple(replace(o, memory={}) for o in plan.orders)))


class LosesState(InProcess):
    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        for outcome in super().run(algorithm, plan):
            yield replace(outcome, state={}) if isinstance(outcome, ClientUpdate) else outcome


@pytest.mark.parametrize(
    ("broken", "kind"), [(LosesMemory, DepthFL), (LosesMemory, PersonalHeads), (LosesState, PersonalHeads)]
)
def test_a_backend_that_loses_what_is_kept(broken: type[InProcess], kind: type) -> None:
    with pytest.raises(AssertionError):
        BackendSuite().test_what_is_kept_for_a_client_travels_both_ways(broken, kind)


@dataclass(frozen=True)
class Beginnings:
    """Sends the first hundred numbers of each tensor; the others arrive as 0."""

    __pydantic_config__ = STRICT

    def encode(self, tensors: Params, seed: int) -> Params:
        return {name: tensor.flatten()[:100].clone() for name, tensor in tensors.items()}

    def decode(self, encoded: Params, header: Header) -> Params:
        found: Params = {}
        for name, (dtype, shape) in header.items():
            found[name] = torch.zeros(shape, dtype=dtype)
            found[name].view(-1)[:100] = encoded[name]
        return found

    def header(self, header: Header) -> Header:
        return {name: (dtype, (min(100, int(np.prod(shape, dtype=int))),)) for name, (dtype, shape) in header.items()}


class Lossless(CodecSuite):
    def most_error(self, codec: object, tensor: Tensor) -> Tensor:
        return torch.zeros(())


def test_a_codec_that_sends_the_beginning_of_large_tensors() -> None:
    with pytest.raises(AssertionError):
        Lossless().test_what_comes_back_is_within_its_error(Beginnings())


class Squeezing(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.squeeze(0)


@dataclass(frozen=True)
class Squeezed(TinyNet):
    """Its batch of one has no batch."""

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        return Squeezing(OrderedDict(super().module(spec).named_children()))


@dataclass(frozen=True)
class Unseeded(TinyNet):
    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        module = super().module(spec)
        drawn = np.random.default_rng().random(self.outputs, dtype=np.float32)
        module.get_parameter("classifier.bias").data += torch.from_numpy(drawn)
        return module


def test_a_network_that_drops_the_axis_of_a_batch_of_one() -> None:
    with pytest.raises(AssertionError):
        ModelSuite().test_a_sample_by_itself_has_the_outputs_that_it_has_among_others(Squeezed())


def test_a_network_whose_first_weights_do_not_follow_from_the_seed() -> None:
    with pytest.raises(AssertionError):
        ModelSuite().test_first_weights_follow_from_the_seed(Unseeded())


@pytest.mark.parametrize("part", ["train_x", "test_x"])
def test_a_data_set_with_a_part_that_is_no_image_of_bytes(part: str) -> None:
    data = digits.load(Path())
    DatasetSuite().test_images_use_the_range_of_a_byte(data)
    with pytest.raises(AssertionError):
        DatasetSuite().test_images_use_the_range_of_a_byte(replace(data, **{part: getattr(data, part) // 255}))


@dataclass(frozen=True)
class SwitchesOn(HeteroFL):
    """Draws values for `extra` where it is 0 too, which is off."""

    extra: NotNegative = 1.0

    def search_space(self, pool: Pool) -> dict[str, Interval]:
        return {"extra": Interval(0.1, 10.0)}


@dataclass(frozen=True)
class Begins(HeteroFL):
    """Does not say what it makes of null."""

    rate: Positive | None = None

    def search_space(self, pool: Pool) -> dict[str, Interval]:
        return {"rate": Interval(0.001, 1000.0, log=True)}


@dataclass(frozen=True)
class Entry(HeteroFL):
    """`widths` begins with 0.5."""

    def search_space(self, pool: Pool) -> dict[str, Interval]:
        return {"widths.0": Interval(0.1, 0.4)}


@dataclass(frozen=True)
class Chosen(HeteroFL):
    def search_space(self, pool: Pool) -> dict[str, Interval]:
        return {"weighting": Interval(choices=("uniform",))}


@pytest.mark.parametrize("kind", [SwitchesOn, Begins, Entry, Chosen])
def test_a_search_space_without_what_is_configured(kind: type[Algorithm]) -> None:
    with pytest.raises(AssertionError, match="and is searched in"):
        AlgorithmSuite().test_a_search_begins_with_what_is_configured(kind(), TinyNet())


@dataclass(frozen=True)
class Whole(HeteroFL):
    extra: NotNegative = 1.0

    def search_space(self, pool: Pool) -> dict[str, Interval]:
        found = {"widths.0": Interval(0.1, 0.5), "weighting": Interval(choices=("uniform", "examples"))}
        return found | ({"extra": Interval(0.001, 1000.0)} if self.extra > 0 else {})


def test_a_search_space_with_what_is_configured() -> None:
    AlgorithmSuite().test_a_search_begins_with_what_is_configured(Whole(), TinyNet())

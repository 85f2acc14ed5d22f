"""Preparations that give weights: stored and checked beside what else they make, and what the rounds start from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from fl_engine.algorithms import FedAvg
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily, PreparationContext, ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, LocalTask, Pool, Prepared
from fl_engine.preparation.weights import Weights
from fl_engine.storage.store import decode
from fl_engine.testing.tiny import assert_same_bits
from flexfleet.files import prepared
from flexfleet.pipeline.check import check
from flexfleet.pipeline.partition import initial_state, partition, site_of
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from tests.harness.alike import run_of
from tests.harness.prepared import prepare

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

HERE = __name__


@dataclass(frozen=True)
class Head:
    score: float
    weights: Weights = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Train:
    """A few steps on the server's data."""

    settings: ClassVar[tuple[str, ...]] = ()
    needs_data: ClassVar[bool] = True
    artifact: ClassVar[Any] = Head

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Head:
        start = initial_params(family, seeds.derive(server.seed, "warm"))
        weights = server.train(LocalTask(FULL, SGD(0.05), 3, 8, False, server.seed), start)
        return Head(server.evaluate(FULL, weights), weights)

    def assumed(self, family: ModelFamily) -> Any:
        return Head(0.0)


@dataclass(frozen=True)
class Warm(FedAvg):
    """FedAvg from weights that the server has trained."""

    preparations: ClassVar[tuple[str, ...]] = (f"{HERE}:Train",)

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        (head,) = prepared.values()
        if head.weights:  # empty in a check
            assert head.weights.keys() == initial_params(family, 0).keys()
        return super().pool(family, prepared, server)


class Sketch(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    note: str
    weights: Weights = {}


@dataclass(frozen=True)
class Fresh:
    """The weights that a run has anyway."""

    settings: ClassVar[tuple[str, ...]] = ()
    needs_data: ClassVar[bool] = False
    artifact: ClassVar[Any] = Sketch

    def prepare(self, family: ModelFamily, server: PreparationContext) -> Sketch:
        weights = initial_params(family, seeds.derive(server.seed, "init"))
        return Sketch(note="fresh", weights=dict(sorted(weights.items())))

    def assumed(self, family: ModelFamily) -> Any:
        return Sketch(note="assumed")


@dataclass(frozen=True)
class FromFresh(Warm):
    preparations: ClassVar[tuple[str, ...]] = (f"{HERE}:Fresh",)


@dataclass(frozen=True)
class Both(Warm):
    preparations: ClassVar[tuple[str, ...]] = (f"{HERE}:Train", f"{HERE}:Fresh")


JSON, FILE = f"{HERE}.Train.json", f"{HERE}.Train.safetensors"


@pytest.fixture
def of(quick: Sequence[str]) -> Callable[..., list[str]]:
    def sets(algorithm: str, *more: str) -> list[str]:
        name = algorithm if algorithm == "all_large" else f"{HERE}:{algorithm}"
        return [*quick, f"algorithm.name={name}", "algorithm.eligible=all", "rounds.stop=2", *more]

    return sets


def test_the_rounds_start_from_the_weights(of: Any, tmp_path: Path) -> None:
    resolved = Resolved.load(None, of("Warm"))
    prepare(resolved, tmp_path)
    made = prepared.read(tmp_path / "pretrain", resolved.algorithm.preparations)[f"{HERE}:Train"]
    site = site_of(resolved, tmp_path / "partition", tmp_path / "pool")
    first = initial_state(resolved, site, tmp_path / "pool").params
    assert_same_bits(first, made.weights)
    assert_same_bits(first, decode((tmp_path / "pretrain" / FILE).read_bytes(), FILE))
    fresh = initial_params(site.family, seeds.derive(resolved.config.seed, "init"))
    assert all(not torch.equal(first[name], fresh[name]) for name in fresh)
    assert json.loads((tmp_path / "pretrain" / JSON).read_bytes()) == {"schema_version": 1, "score": made.score}


def test_the_weights_that_a_run_has_anyway_change_no_bit(flexfleet: Any, of: Any) -> None:
    names = ("all_large", "FromFresh", "Warm")
    plain, fresh, warm = (run_of(flexfleet, name, of(name))["model_sha256"] for name in names)
    assert fresh == plain != warm


def test_two_preparations_cannot_both_give_them(of: Any, tmp_path: Path) -> None:
    resolved = Resolved.load(None, of("Both"))
    partition(resolved, tmp_path / "partition")
    said = rf"{HERE}:Train and {HERE}:Fresh"
    with pytest.raises(ConfigError, match=said):
        check(resolved)
    with pytest.raises(ConfigError, match=said):
        pretrain(resolved, tmp_path / "partition", tmp_path / "pretrain")

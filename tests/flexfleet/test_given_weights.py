"""Preparations that give weights: stored and checked beside what else they make, and what the rounds start from."""

from __future__ import annotations

import json
import shutil
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
from fl_engine.core.errors import ConfigError, IntegrityError, ModelError
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, LocalTask, Params, Pool, Prepared
from fl_engine.preparation.weights import Weights, fitting
from fl_engine.storage.store import decode, sha256
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from flexfleet.files import prepared
from flexfleet.pipeline.check import check
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from flexfleet.pipeline.retry import federate_in
from flexfleet.pipeline.site import given_weights, initial_state, site_of

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


def steps(folder: Path, sets: Sequence[str], known: Path | None = None) -> Resolved:
    resolved = Resolved.load(None, sets)
    partition(resolved, folder / "partition")
    pretrain(resolved, folder / "partition", folder / "pretrain", known)
    model_pool(resolved, folder / "pretrain", folder / "pool")
    return resolved


def run(flexfleet: Any, run_id: str, sets: Sequence[str], *more: str) -> str:
    done = flexfleet("run", "--json", "--run-id", run_id, *more, sets=list(sets))
    assert done.code == 0, done.err
    return str(done.json["model_sha256"])


# ------------------------------------------------------------------------------------------------ the start
def test_the_rounds_start_from_the_weights(of: Any, tmp_path: Path) -> None:
    resolved = steps(tmp_path, of("Warm"))
    made = prepared.read(tmp_path / "pretrain", resolved.algorithm.preparations)[f"{HERE}:Train"]
    site = site_of(resolved, tmp_path / "partition", tmp_path / "pool")
    first = initial_state(resolved, site, given_weights(tmp_path / "pool", site.family)).params
    assert_same_bits(first, made.weights)
    assert_same_bits(first, decode((tmp_path / "pretrain" / FILE).read_bytes(), FILE))
    fresh = initial_state(resolved, site).params
    assert all(not torch.equal(first[name], fresh[name]) for name in fresh)
    assert json.loads((tmp_path / "pretrain" / JSON).read_bytes()) == {"schema_version": 1, "score": made.score}


def test_the_weights_that_a_run_has_anyway_change_no_bit(flexfleet: Any, of: Any) -> None:
    plain, fresh, warm = (run(flexfleet, name.lower(), of(name)) for name in ("all_large", "FromFresh", "Warm"))
    assert fresh == plain != warm


def test_steps_in_folders_of_their_own_and_a_run_make_the_same(flexfleet: Any, of: Any, tmp_path: Path) -> None:
    whole = run(flexfleet, "whole", of("Warm"))
    resolved = steps(tmp_path / "made", of("Warm"))
    shutil.rmtree(tmp_path / "made" / "pretrain")
    copied = shutil.copytree(tmp_path / "made" / "pool", tmp_path / "elsewhere")
    out = federate_in(tmp_path / "rounds", resolved, tmp_path / "made" / "partition", copied, tmp_path / "out")
    assert sha256((out / "model.safetensors").read_bytes()) == whole


# --------------------------------------------------------------------------------------------- it is damaged
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    "cut off": lambda value: value[:-5],
    "empty": lambda value: b"",
    "gone": lambda value: None,
}


def damage(path: Path, how: str) -> None:
    changed = DAMAGE[how](path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_weights_of_a_preparation_are_named(of: Any, tmp_path: Path, how: str) -> None:
    resolved = steps(tmp_path, of("Warm"))
    path = tmp_path / "pretrain" / FILE
    before = path.read_bytes()
    damage(path, how)
    with pytest.raises(IntegrityError, match=FILE):
        model_pool(resolved, tmp_path / "pretrain", tmp_path / "pool")
    if how == "gone":  # it is computed again, as any preparation whose file is gone
        steps(tmp_path, of("Warm"))
        assert path.read_bytes() == before
    else:
        with pytest.raises(IntegrityError, match=f"{FILE} is damaged"):
            pretrain(resolved, tmp_path / "partition", tmp_path / "pretrain")


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_weights_of_a_pool_are_named(of: Any, tmp_path: Path, how: str) -> None:
    resolved = steps(tmp_path, of("Warm"))
    damage(tmp_path / "pool/weights.safetensors", how)
    with pytest.raises(IntegrityError, match=r"pool/weights\.safetensors"):
        federate(resolved, tmp_path / "partition", tmp_path / "pool", tmp_path / "run")


# --------------------------------------------------------------------------------------------- it is refused
def test_two_preparations_cannot_both_give_them(of: Any, tmp_path: Path) -> None:
    resolved = Resolved.load(None, of("Both"))
    partition(resolved, tmp_path / "partition")
    said = rf"the preparations {HERE}:Train and {HERE}:Fresh"
    with pytest.raises(ConfigError, match=said):
        check(resolved)
    with pytest.raises(ConfigError, match=said):
        pretrain(resolved, tmp_path / "partition", tmp_path / "pretrain")


NET = TinyNet()
WHOLE = initial_params(NET, 1)
WRONG: dict[str, tuple[Params, str]] = {
    "a name missing": ({n: t for n, t in WHOLE.items() if n != "fc.linear.bias"}, r"missing: fc\.linear\.bias"),
    "a name too many": ({**WHOLE, "zz": torch.zeros(1)}, "unexpected: zz"),
    "a slice": (
        {**WHOLE, "conv.conv.bias": torch.zeros(4)},
        r"conv\.conv\.bias is float32 \(4,\) instead of",
    ),
    "half": (
        {**WHOLE, "conv.conv.bias": torch.zeros(8).half()},
        r"conv\.conv\.bias is float16 \(8,\) instead of",
    ),
    "not a number": ({**WHOLE, "conv.conv.bias": torch.full((8,), torch.nan)}, "conv.conv.bias has numbers that are n"),
    "infinite": ({**WHOLE, "conv.conv.bias": torch.full((8,), torch.inf)}, "not finite, or beyond 1e\\+09"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_the_whole_network_does_not_fit(what: str) -> None:
    weights, said = WRONG[what]
    with pytest.raises(ModelError, match=said):
        fitting(NET, weights)

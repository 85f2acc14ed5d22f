"""Preparations through `flexfleet run`: the pool follows from what the search of
docs/guides/extending/preparations.md finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.levels import prefix_pool
from fl_engine.core.contracts import ModelFamily, PreparationContext, ServerContext
from fl_engine.core.errors import ConfigError, PartitionError
from fl_engine.core.types import Pool, Prepared
from flexfleet.files import prepared
from flexfleet.files.artifacts import PoolFile
from flexfleet.pipeline.check import check
from flexfleet.pipeline.partition import cut
from flexfleet.pipeline.prepare import Resolved
from tests.harness.alike import run_of
from tests.harness.processes import refused
from tests.harness.searched import MADE, prepared_in
from tests.harness.searched import searched as searched  # a fixture

pytestmark = pytest.mark.usefixtures("searched")

HERE = __name__
TABLE = ("dataset.name=fl_engine.testing.kinds:TABLE", "model.name=fl_engine.testing.kinds:TinyMLP")


@pytest.fixture
def sets(quick: Sequence[str]) -> list[str]:
    return [*quick, "algorithm.name=searched:Searched"]


# ------------------------------------------------------------------------------------------------ it decides
def test_what_is_found_decides_the_pool(flexfleet: Any, sets: list[str]) -> None:
    sets = [*(each for each in sets if not each.startswith(("dataset.", "model."))), *TABLE, "rounds.stop=1"]
    widths = {}
    for tolerance in (0.0, 1e9):
        run_id = f"t{tolerance:g}"
        run_of(flexfleet, run_id, [*sets, f"algorithm.tolerance={tolerance}"])
        found = json.loads(Path("runs", run_id, "pretrain", MADE).read_bytes())
        small, full = PoolFile.read(Path("runs", run_id, "pool", "pool.json")).levels
        assert (small.name, full.share) == (f"{found['width']:g}x", 1.0)
        scores = {float(width): score for width, score in found["scores"].items()}
        assert list(scores) == [0.25, 0.5, 0.75]
        assert len(set(scores.values())) > 1, "candidates are told apart"
        enough = [width for width in scores if scores[width] >= max(scores.values()) - tolerance]
        widths[tolerance] = found["width"]
        assert found["width"] == min(enough)
    assert widths[1e9] == 0.25


# ------------------------------------------------------------------------------------------- what the pool gets
@dataclass(frozen=True)
class Counts(FlexFL):
    preparations: ClassVar[tuple[str, ...]] = ()  # type: ignore[assignment, misc]

    def pool(self, family: ModelFamily, made: Prepared, server: ServerContext) -> Pool:
        assert made == {}
        share = max(server.samples.values()) / sum(server.samples.values())
        assert len(server.data.train_y) == 24
        return prefix_pool(self, family, (share, 1.0))


def test_the_pool_may_ask_the_server(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, f"algorithm.name={HERE}:Counts", "rounds.stop=1"]
    sizes = [len(part) for part in cut(Resolved.load(None, sets)).clients]
    run_of(flexfleet, "a", sets)
    pool = PoolFile.read(Path("runs/a/pool/pool.json"))
    assert pool.levels[0].name == f"{max(sizes) / sum(sizes):g}x"
    shown = flexfleet("pool", "--json", sets=sets).json
    assert all(level.pop("flops") == level["macs"] for level in shown["levels"])
    assert PoolFile.model_validate(shown) == pool
    assert "needs the server's data" in refused(flexfleet("pool", "--input", "1x8x8", "--classes", "10", sets=sets))


@dataclass(frozen=True)
class Looks:
    settings: ClassVar[tuple[str, ...]] = ()
    needs_data: ClassVar[bool] = True
    artifact: ClassVar[Any] = dict

    def prepare(self, family: ModelFamily, server: PreparationContext) -> dict[str, Any]:
        other = server.reference
        return {
            "train": server.data.train_x.flatten(1).sum(1).tolist(),
            "test": server.data.test_x.flatten(1).sum(1).tolist(),
            "settings": dict(server.settings),
            "reference": None if other is None else [len(other.data.train_y), len(other.data.test_y)],
        }

    def assumed(self, family: ModelFamily) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Looking(Counts):
    preparations: ClassVar[tuple[str, ...]] = (f"{HERE}:Looks",)  # type: ignore[assignment, misc]


def test_preparation_gets_both_proxy_parts_and_its_settings(tmp_path: Path, quick: Sequence[str]) -> None:
    sets = [*quick, f"algorithm.name={HERE}:Looking"]
    resolved = Resolved.load(None, sets)
    parts, x = cut(resolved), resolved.data.train_x.flatten(1).sum(1)
    for reference in (False, True):
        given = [*sets, f"pretrain.reference={str(reference).lower()}"]
        (seen,) = prepared.read(prepared_in(tmp_path / "a", given), (f"{HERE}:Looks",)).values()
        assert seen["train"] == x[parts.proxy_train].tolist()
        assert seen["test"] == x[parts.proxy_test].tolist()
        assert len(seen["train"]) == 19 and len(seen["test"]) == 5
        pretrained = resolved.config.pretrain.model_dump() | {"reference": reference}
        assert seen["settings"] == {f"pretrain.{key}": value for key, value in pretrained.items()}
        assert seen["reference"] == ([192, 48] if reference else None)


def test_a_shared_proxy_may_be_all_training_data(tmp_path: Path, quick: Sequence[str]) -> None:
    sets = [*quick, f"algorithm.name={HERE}:Looking", "partition.proxy=1.0", "partition.proxy_shared=true"]
    resolved = Resolved.load(None, sets)
    everything = resolved.data.train_x.flatten(1).sum(1)
    (seen,) = prepared.read(prepared_in(tmp_path / "a", sets), (f"{HERE}:Looks",)).values()
    assert sorted(seen["train"] + seen["test"]) == sorted(everything.tolist())
    assert len(seen["test"]) == round(0.2 * len(everything))
    wrong = Resolved.load(None, [*sets, "noise.labels=0.1"])
    with pytest.raises(PartitionError, match=r"partition\.proxy_shared"):
        cut(wrong)


# --------------------------------------------------------------------------------------------- it is refused
@dataclass(frozen=True)
class Unlisted(Looks):
    def prepare(self, family: ModelFamily, server: PreparationContext) -> dict[str, Any]:
        return {"epsilon": server.settings["algorithm.epsilon"]}


def test_parameter_outside_the_settings_is_named(
    tmp_path: Path, quick: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looking, "preparations", (f"{HERE}:Unlisted",))
    with pytest.raises(ConfigError, match=r"'algorithm\.epsilon'") as error:
        prepared_in(tmp_path / "a", [*quick, f"algorithm.name={HERE}:Looking"])
    assert error.value.code == "config.own_code"


@dataclass(frozen=True)
class Asks(Looks):
    settings: ClassVar[tuple[str, ...]] = ("algorithm.epsilom",)


@dataclass(frozen=True)
class NoPrepare:
    settings: ClassVar[tuple[str, ...]] = ()


WRONG = {
    "nowhere:Search": "cannot be imported",
    "__main__:Search": "Define it in a file",
    "apos": "did you mean 'apoz'?",
    f"{HERE}:NoPrepare": "must define needs_data, artifact, prepare, assumed",
    f"{HERE}:Asks": "'algorithm.epsilom'",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_preparation_is_refused_before_anything_runs(
    name: str, quick: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looking, "preparations", (name,))
    resolved = Resolved.load(None, [*quick, f"algorithm.name={HERE}:Looking"])
    with pytest.raises(ConfigError) as error:
        check(resolved)
    assert WRONG[name] in str(error.value) and "\n" not in str(error.value)


def test_a_server_without_data_is_refused_where_data_are_needed(sets: list[str], tmp_path: Path) -> None:
    resolved = Resolved.load(None, [*sets, "partition.proxy=0"])
    for step in (lambda: check(resolved), lambda: prepared_in(tmp_path / "a", [*sets, "partition.proxy=0"])):
        with pytest.raises(Exception, match=r"partition\.proxy"):
            step()

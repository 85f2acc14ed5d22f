"""What steps hand to each other: JSON with a schema, partitions and assignments.

What is read is what was written, or valid all through; else the error names the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import ConfigError, IntegrityError, ModelError
from fl_engine.core.types import SubmodelSpec
from fl_engine.remote.messages import AssignmentMessage, Message, read_message
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.urls import Upload
from fl_engine.testing.tiny import TRAINING, tiny_site
from fl_engine.training.evaluation import Score
from fl_engine.training.memory import Peaks
from flexfleet.config import Config
from flexfleet.experiments.nightly_gate import LabelFigures, NightlyFigures
from flexfleet.files.artifacts import EvaluationFile, History, Level, LevelScore, LocalScore, PoolFile, RunFile
from flexfleet.pipeline.evaluate import level_score
from tests.fuzz.mutations import answer, json_like, law

SITE = tiny_site(FlexFL(training=TRAINING))
ROW = Row(
    round=0, metrics={"avg": 0.5, "full": 0.6, "accuracy/M1": 0.5, "loss/M1": 1.0, "seconds_round": 0.1}, clients=()
)  # fmt: skip
LEVEL = Level(
    name="M1", params=40, share=0.4, macs=9, bytes=160, widths={"conv": 2}, dispatched=True, reported=True, gamma=0.5,
    ratios=(0.5,), spec=SubmodelSpec.of({"conv": 2, "hidden": [0, 3]}).to_json(),
)  # fmt: skip
ARTIFACTS = {
    "pool.json": PoolFile(
        algorithm="flexfl", model="small_cnn", input_chw=(1, 8, 8), classes=4, groups={"conv": 8}, levels=(LEVEL,)
    ),
    "run.json": RunFile(
        run_id="a", config=Config().model_dump(mode="json"), pool_sha256="0" * 64, partition_sha256="1" * 64,
        numerics={"strategy": "batched", "lanes": 2, "precision": "fp32", "torch": "2"},
    ),
    "history.json": History(rounds=(ROW,), model_sha256="2" * 64, seconds=0.1),
    "evaluation.json": EvaluationFile(
        rounds=1, test_samples=9, avg=0.5, full=0.6, levels={"M1": LevelScore(accuracy=0.5, loss=1.0, params=40)},
        local={"M1": LocalScore(mean=0.5, sd=0.1, clients=3)}, local_histogram={"M1": {40: 1, 55: 2}},
    ),
    "figures.json": NightlyFigures(
        suite="digits", id="night", when="2026-01-01", commit=None, machine={"cpu": "x"}, seeds=(0, 1),
        labels={"quick/flexfl": LabelFigures(task="0", values={"full": (0.5, 0.6)}, curve=((1, 0.5, (0.5,), (0.6,)),))},
    ),
}  # fmt: skip
"""Artifacts with nested and computed values, by file name."""


@pytest.mark.parametrize("name", ARTIFACTS)
def test_written_artifact_reads_back_equal(tmp_path: Path, name: str) -> None:
    written = ARTIFACTS[name]
    assert type(written).read(written.write(tmp_path / name)) == written


def of_a_kind(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
    return st.tuples(st.just(name), json_like(json.loads(ARTIFACTS[name].model_dump_json())))


def spec_is(value: Any) -> tuple[str, bytes]:
    pool = json.loads(ARTIFACTS["pool.json"].model_dump_json())
    pool["levels"][0]["spec"] = value
    return "pool.json", json.dumps(pool).encode()


@law(120)
@given(st.sampled_from(sorted(ARTIFACTS)).flatmap(of_a_kind))
@example(spec_is({}))
@example(spec_is({"keep": None, "blocks": None}))
@example(spec_is({"keep": {"conv": "many"}, "blocks": None}))
@example(spec_is({"keep": {"conv": 1.5}, "blocks": None}))
@example(spec_is({"keep": {"conv": [1e999]}, "blocks": None}))
@example(("figures.json", ARTIFACTS["figures.json"].model_dump_json().replace("[1,0.5,", "[1,1e999,").encode()))
def test_damaged_artifact_names_its_file(tmp_path: Path, broken: tuple[str, bytes]) -> None:
    name, content = broken
    kind, path = type(ARTIFACTS[name]), tmp_path / name
    path.write_bytes(content)
    found = answer(lambda: kind.read(path), name, kind=IntegrityError)
    if found is not None:
        text = found.model_dump_json()
        assert kind.of(text.encode(), name).model_dump_json() == text
        if isinstance(found, PoolFile):
            pool = answer(found.pool, "pool.json", kind=IntegrityError)
            assert pool is None or len(pool) == len(found.levels) > 0


def test_evaluation_of_a_diverged_model_has_no_loss(tmp_path: Path) -> None:
    """JSON cannot represent NaN, so only this value is lost."""
    score = level_score("M1", Score(0.1, math.nan, {"accuracy": 0.1}), 40)
    written = EvaluationFile(rounds=1, test_samples=9, avg=0.1, full=0.1, levels={"M1": score})
    found = EvaluationFile.read(written.write(tmp_path / "evaluation.json"))
    assert found.levels["M1"].value == 0.1 and found.levels["M1"].loss is None


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_metric_that_is_not_finite_is_named_with_its_level(value: float) -> None:
    with pytest.raises(ModelError, match=f"has diverged: mae of level M1 .* is {value}, expected .* training.lr"):
        level_score("M1", Score(0.1, 2.0, {"r2": 0.1, "mae": value}), 40)


TOLD = json.loads(
    AssignmentMessage(
        round=3, clients=(1, 4), observe="cgroup", memory=Peaks(10, (15, 20)),
        reads={"rounds/00003/assignments/1.json": "http://127.0.0.1:1/x?signature=y"},
        writes={"rounds/00003/updates/1.json": Upload(verb="PUT", url="http://h", fields={"a": "b"}, size=9)},
    ).model_dump_json()
)  # fmt: skip


@pytest.mark.parametrize("memory", [{"base": -1}, {"base": True}, {"base": "10"}, {"levels": [10**400, 1]}])
def test_peaks_of_an_assignment_are_bounded(memory: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AssignmentMessage.model_validate_json(json.dumps({**TOLD, "memory": {**TOLD["memory"], **memory}}))


LEASED = json.loads(Message(name="a", number=1).model_dump_json()) | {
    "lease": {"schema_version": 2, "id": "11" * 8, "seconds": 60.0, "assignment": TOLD}
}


@law(50)
@given(json_like(LEASED))
@example(json.dumps(LEASED | {"lease": LEASED["lease"] | {"assignment": TOLD | {"clients": [-1, 4]}}}).encode())
@example(json.dumps(LEASED | {"lease": LEASED["lease"] | {"assignment": TOLD | {"round": -1}}}).encode())
@example(json.dumps(LEASED | {"lease": LEASED["lease"] | {"seconds": 0.0}}).encode())
def test_read_message_has_a_valid_assignment_or_is_refused(content: bytes) -> None:
    with pytest.raises(IntegrityError):  # nobody has signed it
        read_message(content, "00" * 32, "11" * 32)
    with suppress(ValidationError):
        if (lease := Message.model_validate_json(content).lease) is not None:
            assert min(lease.assignment.clients) >= 0 <= lease.assignment.round and lease.seconds > 0
            answer(lease.assignment.open, "s3://", "store", kind=ConfigError)

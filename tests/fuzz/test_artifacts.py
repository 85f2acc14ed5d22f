"""What steps hand to each other: JSON with a schema, partitions and assignments.

What is read is what was written, or valid all through; else the error names the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import ConfigError, IntegrityError, ModelError
from fl_engine.core.types import SubmodelSpec
from fl_engine.data import partition_files, partitioning
from fl_engine.data.label_noise import made_wrong
from fl_engine.remote.messages import Assignment, Message, read_message
from fl_engine.storage.urls import Upload
from fl_engine.testing.tiny import TRAINING, tiny_site
from fl_engine.training.evaluation import Score
from fl_engine.training.memory import Peaks
from flexfleet.config import Config
from flexfleet.experiments.nightly import Verdict
from flexfleet.experiments.nightly_gate import Check
from flexfleet.experiments.nightly_suite import NightFigures, OfLabel
from flexfleet.files.artifacts import (
    Apoz,
    ApozLayer,
    Artifact,
    BareHistory,
    ConfusionFile,
    EvaluationFile,
    History,
    Level,
    LevelScore,
    LocalScore,
    PoolFile,
    Result,
    RunFile,
    row_of,
)
from flexfleet.files.prepared import Entry, Index
from flexfleet.pipeline.evaluate import told
from flexfleet.pipeline.share import Shared
from tests.fuzz.mutations import answer, damaged, json_like, law

SITE = tiny_site(FlexFL(training=TRAINING))
ROW = {
    "schema_version": 1,
    "round": 0,
    "metrics": {"avg": 0.5, "full": 0.6, "accuracy/M1": 0.5, "loss/M1": 1.0, "train_loss": 1.0, "bytes_down": 9.0,
                "bytes_up": 8.0, "clients_trained": 2.0, "clients_pruned": 0.0, "clients_failed": 0.0,
                "seconds_round": 0.1},
    "clients": [{"client": 0, "sent": "M1", "loss": 1.0}],
}  # fmt: skip
LEVEL = Level(
    name="M1", params=40, share=0.4, flops=9, bytes=160, widths={"conv": 2}, dispatched=True, reported=True, gamma=0.5,
    ratios=(0.5,), spec=SubmodelSpec.of({"conv": 2, "hidden": [0, 3]}).to_json(),
)  # fmt: skip
ARTIFACTS: dict[str, Artifact] = {
    "apoz.json": Apoz(layers=(ApozLayer(group="conv", size=9, apoz=0.5, adjustment=1.0),), reference=(0.5,)),
    "prepared.json": Index(made={"apoz": Entry(inputs="3" * 64, sha256="4" * 64)}),
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
    "confusion.json": ConfusionFile(levels={"M1": ((1, 2), (3, 4))}),
    "result.json": Result(
        run_id="a", status="finished", metrics={"avg": 0.5}, bytes={"down": 9, "up": 8}, waste=0.1, seconds=0.1,
        model_sha256="2" * 64, store_uri="runs/a", mlflow_run_id=None, report="runs/a/report.html",
    ),
    "shared.json": Shared(settings={"seed": 0}),
    "figures.json": NightFigures(
        suite="digits", id="night", when="2026-01-01", commit=None, machine={"cpu": "x"}, seeds=(0, 1),
        labels={"quick/flexfl": OfLabel(task="0", values={"full": (0.5, 0.6)}, curve=((1, 0.5, (0.5,), (0.6,)),))},
    ),
    "regression.json": Verdict(
        suite="digits", id="night", passed=False, since="reference, a..b", commits=(), notes=(), report="r",
        mlflow_run_id=None,
        checks=(Check(label="quick/flexfl", metric="full", against="reference", now=0.5, before=0.6, worse_by=0.1,
                      allowed=0.02, limit=0.58, failed=True),),
    ),
}  # fmt: skip
"""One artifact of each kind, by file name."""


@pytest.mark.parametrize("name", ARTIFACTS)
def test_an_artifact_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
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
def test_an_artifact_is_read_or_its_file_is_named(tmp_path: Path, broken: tuple[str, bytes]) -> None:
    name, content = broken
    kind, path = type(ARTIFACTS[name]), tmp_path / name
    path.write_bytes(content)
    found = answer(lambda: kind.read(path), name, kind=IntegrityError)
    if found is not None:
        assert kind.model_validate_json(text := found.model_dump_json()).model_dump_json() == text
        if isinstance(found, PoolFile):
            pool = answer(found.pool, "pool.json", kind=IntegrityError)
            assert pool is None or len(pool) == len(found.levels) > 0
        if isinstance(found, History):
            assert [row_of(row).round for row in found.rounds] == [row["round"] for row in found.rounds]
    if kind is History:  # most readers leave out what it says of single clients
        bare = answer(lambda: BareHistory.read(path), name, kind=IntegrityError)
        if found is not None and bare is not None:
            assert [row_of(row).metrics for row in bare.rounds] == [row_of(row).metrics for row in found.rounds]


def test_a_model_that_diverged_is_evaluated_all_the_same(tmp_path: Path) -> None:
    """JSON cannot represent NaN, so only this value is lost."""
    score = told("M1", Score(0.1, math.nan, {"accuracy": 0.1}), 40)
    written = EvaluationFile(rounds=1, test_samples=9, avg=0.1, full=0.1, levels={"M1": score})
    found = EvaluationFile.read(written.write(tmp_path / "evaluation.json"))
    assert found.levels["M1"].value == 0.1 and found.levels["M1"].loss is None


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_metric_that_is_not_finite_is_named_with_its_level(value: float) -> None:
    with pytest.raises(ModelError, match=f"has diverged: mae of level M1 .* is {value}, expected .* training.lr"):
        told("M1", Score(0.1, 2.0, {"r2": 0.1, "mae": value}), 40)


# --------------------------------------------------------------------------------------------------- partition
WHOLE = partitioning.partition(SITE.data, "iid", 4, 0.1, 0)
Y = SITE.data.train_y.numpy()
DEALT = partitioning.partition(SITE.data, "dirichlet", 4, 0.1, 0, alpha=0.5, clusters=np.arange(len(Y)) % 3)
OTHERS = 1.0 - np.eye(SITE.data.task.outputs)
WRONG = made_wrong(Y, DEALT.clients, OTHERS / OTHERS.sum(1), 0.5, 0)
OWNED = partitioning.partition(SITE.data, "iid", 4, 0.1, 0, server_classes=(1, 3))
KINDS = {"plain": WHOLE, "clusters and noise": replace(DEALT, noise=WRONG), "classes of the server": OWNED}
kinds = pytest.mark.parametrize("kind", KINDS)


def saved(folder: Path, kind: str = "plain") -> tuple[dict[str, Any], bytes]:
    partition_files.save(KINDS[kind], folder)
    manifest = json.loads((folder / partition_files.MANIFEST).read_bytes())
    return manifest, (folder / partition_files.TENSORS).read_bytes()


@kinds
@law(40)
@given(data=st.data())
def test_damaged_partition_names_its_file(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    _, tensors = saved(tmp_path, kind)
    content = data.draw(damaged(tensors), label="content")
    (tmp_path / partition_files.TENSORS).write_bytes(content)
    found = answer(lambda: partition_files.load(tmp_path, SITE.data), str(tmp_path), kind=IntegrityError)
    assert (found is not None) == (content == tensors)


# ------------------------------------------------------------------------------------------------- assignments
TOLD = json.loads(
    Assignment(
        round=3, clients=(1, 4), observe="cgroup", memory=Peaks(10, (15, 20)),
        reads={"rounds/00003/orders/1.json": "http://127.0.0.1:1/x?signature=y"},
        writes={"rounds/00003/updates/1.json": Upload(verb="PUT", url="http://h", fields={"a": "b"}, size=9)},
    ).model_dump_json()
)  # fmt: skip


@pytest.mark.parametrize("memory", [{"base": -1}, {"base": True}, {"base": "10"}, {"levels": [10**400, 1]}])
def test_peaks_of_an_assignment_are_bounded(memory: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Assignment.model_validate_json(json.dumps({**TOLD, "memory": {**TOLD["memory"], **memory}}))


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

"""Wrong labels, clusters and a map of a partition: on every backend, and in a resumed run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.core.errors import BadInput
from fl_engine.data.partition import TENSORS, Partition, read_manifest
from fl_engine.testing.kinds import tiny_table
from flexfleet.pipeline.check import check
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import cut, partition, site_of
from flexfleet.pipeline.prepare import Resolved
from tests.harness.alike import alike, run_of

pytestmark = pytest.mark.usefixtures("own_folder")

HELD_OUT = ("evaluate.on=clients", "evaluate.held_out=0.4")
NOISE = ("noise.labels=0.5", "noise.epochs=1", "noise.sure=1.0")
ALL = ("dataset.train_samples=null", "dataset.test_samples=null")
TABLE = ("dataset.name=fl_engine.testing.kinds:TABLE", "model.name=fl_engine.testing.kinds:TinyMLP")


@pytest.fixture
def plain(quick: Sequence[str]) -> list[str]:
    """Without a network and data of its own."""
    return [each for each in quick if not each.startswith(("dataset.", "model."))]


def test_backends_and_resumed_run_use_the_same_wrong_labels(
    flexfleet: Any, quick: Sequence[str], no_drawings: None
) -> None:
    sets = [*quick, *NOISE, "algorithm.name=heterofl"]  # whose clients send the rows of the labels that they hold
    right = run_of(flexfleet, "right", [*sets, "noise.labels=0.0"])
    assert right["model_sha256"] != alike(flexfleet, sets)["one"]["model_sha256"]


def test_partition_without_noise_keeps_its_bits(quick: Sequence[str], tmp_path: Path) -> None:
    for name, more in (("a", ()), ("b", ("noise.epochs=3", "noise.sure=0.5"))):
        partition(Resolved.load(None, [*quick, *more]), tmp_path / name)
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix != ".svg"} for name in "ab"
    ]
    assert contents[0] == contents[1]
    assert not Path("runs").exists()


def test_wrong_labels_do_not_depend_on_the_algorithm(quick: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    def made(name: str, *more: str) -> bytes:
        partition(Resolved.load(None, [*quick, *NOISE, *more]), tmp_path / name)
        return (tmp_path / name / TENSORS).read_bytes()

    first = made("a")
    assert made("other algorithm", "algorithm.name=scalefl") == first != made("less", "noise.labels=0.2")


def test_held_out_samples_keep_their_labels(quick: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    resolved = Resolved.load(None, [*quick, *NOISE, *HELD_OUT, "algorithm.name=all_large"])
    partition(resolved, tmp_path / "a")
    site = site_of(resolved, tmp_path / "a", model_pool(resolved, tmp_path / "a", tmp_path / "pool").parent)
    wrong = (site.data.train_y != resolved.data.train_y).numpy()
    assert site.held and not wrong[np.concatenate(site.held)].any()
    assert site.partition.noise is not None
    assert site.partition.noise.wrong == tuple(wrong[own].sum() for own in site.partition.clients) != (0,) * 6


def test_no_client_gets_labels_of_the_servers_classes(quick: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    resolved = Resolved.load(None, [*quick, *NOISE, "partition.server_classes=[1, 8]"])
    partition(resolved, tmp_path / "a")
    found = Partition.load(tmp_path / "a", resolved.data)
    assert found.noise is not None and found.noise.reached(sum(map(len, found.noisy))) > 0.2
    assert not np.isin(np.concatenate(found.noisy), (1, 8)).any()


def test_label_noise_needs_classes(flexfleet: Any, plain: Sequence[str]) -> None:
    for command in (("check",), ("run", "--run-id", "a")):
        assert flexfleet(*command, sets=[*plain, *TABLE, "algorithm.epsilon=40.0", "noise.labels=0.1"]).code == 2


def test_run_partitions_by_clusters_of_features(flexfleet: Any, quick: Sequence[str]) -> None:
    sets = [*quick, "partition.features=small_cnn", "partition.clusters=4"]
    flexfleet("run", "--json", "--run-id", "a", sets=sets).ok()
    manifest = read_manifest(Path("runs/a/partition/partition.json"))
    assert manifest.label == "cluster" and len(manifest.class_counts) == 4
    assert "Samples of each cluster at each client" in Path("runs/a/partition/partition.svg").read_text()
    assert "Number of samples of each cluster at each client" in Path("runs/a/report.html").read_text()


def test_clusters_of_features_in_a_file(plain: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    samples = len(tiny_table().train_y)
    np.save("f.npy", np.eye(3)[np.arange(samples) % 3])
    more = ("partition.features=f.npy", "partition.clusters=3", "partition.minimum=2")
    partition(Resolved.load(None, [*plain, *TABLE, *more]), tmp_path / "a")
    found = Partition.load(tmp_path / "a", tiny_table())
    assert found.clusters is not None and found.label == "cluster"
    assert len(set(zip(found.clusters.tolist(), (np.arange(samples) % 3).tolist(), strict=True))) == 3


def test_map_assigns_samples_to_clients(plain: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    data = tiny_table()
    whose = np.arange(len(data.train_y)) % 3
    Path("map.json").write_text(json.dumps({"clients": [np.flatnonzero(whose == c).tolist() for c in range(3)]}))
    sets = [*plain, *TABLE, "partition.rule=manual", "partition.map=map.json", "partition.clients=3"]
    partition(Resolved.load(None, sets), tmp_path / "a")
    found = Partition.load(tmp_path / "a", data)
    for client, held in enumerate(found.clients):
        assert len(held) and (whose[held] == client).all()
    assert found.label == "quantile bin"


@pytest.mark.parametrize(
    "sets",
    [
        ("partition.features=none.npy",),
        ("partition.features=small_cnnn",),
        ("partition.features=aep_mlp",),
        ("dataset.name=fl_engine.testing.kinds:SEQUENCES", *ALL, "partition.features=fl_engine.testing.kinds:TinyMLP"),
        ("partition.features=vgg16", "dataset.pad=none"),
        ("partition.rule=manual",),
        ("partition.rule=manual", "partition.map=none.json"),
        ("partition.features=small_cnn", "partition.clusters=5000"),
    ],
)
def test_impossible_labels_are_bad_input(quick: Sequence[str], sets: Sequence[str]) -> None:
    with pytest.raises(BadInput):
        cut(Resolved.load(None, [*quick, *sets]))


def test_check_writes_nothing(quick: Sequence[str]) -> None:
    resolved = Resolved.load(None, [*quick, *NOISE, "partition.features=small_cnn", "partition.clusters=4"])
    check(resolved)
    assert cut(resolved).clusters is not None and not Path("runs").exists()

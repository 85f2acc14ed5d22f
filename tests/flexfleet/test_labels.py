"""Wrong labels, clusters and a map through `flexfleet run`: every backend, resumed, kept by their inputs, told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.core.errors import BadInput
from fl_engine.data import partition_files
from fl_engine.preparation.confusion import Confusion
from fl_engine.testing.kinds import tiny_table
from flexfleet.pipeline import labels
from flexfleet.pipeline.check import check
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import cut, partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import inputs_of
from flexfleet.pipeline.site import site_of

HELD_OUT = ("evaluate.on=clients", "evaluate.held_out=0.4")
NOISE = ("noise.labels=0.5", "noise.epochs=1", "noise.sure=1.0")
ALL = ("dataset.train_samples=null", "dataset.test_samples=null")
TABLE = ("dataset.name=fl_engine.testing.kinds:TABLE", "model.name=fl_engine.testing.kinds:TinyMLP")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(labels, "_COMPUTED", {})


@pytest.fixture
def plain(quick: Sequence[str]) -> list[str]:
    """Without a network and data of its own."""
    return [each for each in quick if not each.startswith(("dataset.", "model."))]


def kept(name: str) -> list[Path]:
    return sorted(Path("runs/.kept").glob(f"{name}-*.json"))


# ------------------------------------------------------------------------------------------------ wrong labels
def test_backends_and_resumed_run_use_the_same_wrong_labels(
    flexfleet: Any, quick: Sequence[str], no_drawings: None
) -> None:
    sets = [*quick, *NOISE, "algorithm.name=heterofl"]  # whose clients send the rows of the labels that they hold
    ways = {"one": (), "threads": ("run.devices=[cpu, cpu]",), "processes": ("run.backend=processes",)}
    done = {name: flexfleet("run", "--json", "--run-id", name, sets=[*sets, *more]) for name, more in ways.items()}
    assert {name: each.code for name, each in done.items()} == dict.fromkeys(ways, 0), done["one"].err
    assert flexfleet("run", "--run-id", "again", sets=[*sets, "rounds.stop=1"]).code == 0
    done["again"] = flexfleet("run", "--json", "--run-id", "again", "--resume", sets=sets)
    assert len({each.json["model_sha256"] for each in done.values()}) == 1
    right = flexfleet("run", "--json", "--run-id", "right", sets=[*sets, "noise.labels=0.0"])
    assert right.json["model_sha256"] != done["one"].json["model_sha256"]
    assert len(kept("confusion")) == 1, "trained once, for all of them"


def test_partition_without_noise_keeps_its_bits(
    quick: Sequence[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(labels, "measure_confusion", None)
    for name, more in (("a", ()), ("b", ("noise.epochs=3", "noise.sure=0.5"))):
        partition(Resolved.load(None, [*quick, *more]), tmp_path / name)
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix != ".svg"} for name in "ab"
    ]
    assert contents[0] == contents[1]
    assert not Path("runs").exists()


def test_confusion_matrix_is_cached_by_its_inputs(quick: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    def made(name: str, *more: str) -> bytes:
        partition(Resolved.load(None, [*quick, *NOISE, *more]), tmp_path / name)
        return (tmp_path / name / partition_files.TENSORS).read_bytes()

    first = made("a")
    (matrix,) = kept("confusion")
    assert made("b") == first
    assert made("less", "noise.labels=0.2") != first and made("other algorithm", "algorithm.name=scalefl") == first
    assert kept("confusion") == [matrix]
    matrix.unlink()
    assert made("c") == first, "as after a kill before it was kept"
    assert made("longer", "noise.epochs=2") != first and len(kept("confusion")) == 2
    made("seed", "partition.seed=9")
    assert len(kept("confusion")) == 3


def test_what_clients_hold_out_keeps_its_labels(quick: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    resolved = Resolved.load(None, [*quick, *NOISE, *HELD_OUT, "algorithm.name=all_large"])
    partition(resolved, tmp_path / "a")
    site = site_of(resolved, tmp_path / "a", model_pool(resolved, tmp_path / "a", tmp_path / "pool").parent)
    wrong = (site.data.train_y != resolved.data.train_y).numpy()
    assert site.held and not wrong[np.concatenate(site.held)].any()
    assert site.partition.noise is not None
    assert site.partition.noise.figures.wrong == tuple(wrong[own].sum() for own in site.partition.clients) != (0,) * 6


def test_no_client_gets_labels_of_the_servers_classes(quick: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    resolved = Resolved.load(None, [*quick, *NOISE, "partition.server_classes=[1, 8]"])
    partition(resolved, tmp_path / "a")
    found = partition_files.load(tmp_path / "a", resolved.data)
    assert found.noise is not None and found.noise.reached > 0.2
    assert not np.isin(np.concatenate(found.noise.labels), (1, 8)).any()


def test_what_a_cpu_found_is_not_taken_over_on_a_gpu(
    quick: Sequence[str], no_drawings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(labels, "check_device", lambda name: None)
    counts, seen = tuple(tuple(int(i != j) for j in range(10)) for i in range(10)), list[str]()

    def measured(*given: Any) -> Confusion:
        seen.append(given[-1])
        return Confusion(counts=counts, accuracy=0.0)

    monkeypatch.setattr(labels, "measure_confusion", measured)
    inputs = []
    for device in ("cpu", "cpu", "cuda:0", "cuda:1"):
        resolved = Resolved.load(None, [*quick, *NOISE, f"run.devices=[{device}]"])
        partition(resolved, tmp_path / "a")
        inputs.append(inputs_of(resolved, "apoz", tmp_path / "a"))
    assert seen == ["cpu", "cuda:0"]
    assert inputs[0] == inputs[1] != inputs[2] == inputs[3]


def test_numbers_are_refused_before_anything_trains(flexfleet: Any, plain: Sequence[str]) -> None:
    for command in (("check",), ("run", "--run-id", "a")):
        done = flexfleet(*command, sets=[*plain, *TABLE, "algorithm.epsilon=40.0", "noise.labels=0.1"])
        assert done.code == 2 and "targets of tiny_table are not classes (regression): set noise.labels=0" in done.err
    assert not Path("runs/.kept").exists()


# ------------------------------------------------------------------------------------------ clusters and a map
def test_a_run_deals_by_clusters_of_a_networks_features(
    flexfleet: Any, quick: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*quick, "partition.features=small_cnn", "partition.clusters=4"]
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    assert done.code == 0, done.err
    manifest = partition_files.read_manifest(Path("runs/a/partition/partition.json"))
    assert manifest.label == "cluster" and len(manifest.class_counts) == 4
    assert "Samples of each cluster at each client" in Path("runs/a/partition/partition.svg").read_text()
    assert "How many samples of each cluster each client holds" in Path("runs/a/report.html").read_text()
    assert len(kept("clusters")) == 1
    monkeypatch.setattr(labels.clusters, "clusters_of", None)  # it is not called again
    again = flexfleet("run", "--json", "--run-id", "b", sets=sets)
    assert again.json["model_sha256"] == done.json["model_sha256"]


def test_clusters_of_a_files_features_belong_to_its_content(
    plain: Sequence[str], no_drawings: None, tmp_path: Path
) -> None:
    samples = len(tiny_table().train_y)
    np.save("f.npy", np.eye(3)[np.arange(samples) % 3])
    more = ("partition.features=f.npy", "partition.clusters=3", "partition.minimum=2")
    sets = [*plain, *TABLE, *more]
    partition(Resolved.load(None, sets), tmp_path / "a")
    found = partition_files.load(tmp_path / "a", tiny_table())
    assert found.clusters is not None and found.label == "cluster"
    assert len(set(zip(found.clusters.tolist(), (np.arange(samples) % 3).tolist(), strict=True))) == 3
    np.save("f.npy", np.eye(3)[np.arange(samples) // (samples // 3 + 1)])
    partition(Resolved.load(None, sets), tmp_path / "b")
    other = partition_files.load(tmp_path / "b", tiny_table())
    assert other.clusters is not None and not np.array_equal(found.clusters, other.clusters)
    assert len(kept("clusters")) == 2


def test_a_map_deals_by_hand(plain: Sequence[str], no_drawings: None, tmp_path: Path) -> None:
    data = tiny_table()
    whose = np.arange(len(data.train_y)) % 3
    Path("map.json").write_text(json.dumps({"clients": [np.flatnonzero(whose == c).tolist() for c in range(3)]}))
    sets = [*plain, *TABLE, "partition.rule=manual", "partition.map=map.json", "partition.clients=3"]
    partition(Resolved.load(None, sets), tmp_path / "a")
    found = partition_files.load(tmp_path / "a", data)
    for client, held in enumerate(found.clients):
        assert len(held) and (whose[held] == client).all()
    assert found.label == "quantile bin"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("partition.features=none.npy",), "partition.features = none.npy cannot be read: No such file"),
        (("partition.features=small_cnnn",), r"no model named 'small_cnnn' \(did you mean 'small_cnn'\?\)"),
        (("partition.features=aep_mlp",), r"aep_mlp .*1x8x8"),
        (
            (
                "dataset.name=fl_engine.testing.kinds:SEQUENCES",
                *ALL,
                "partition.features=fl_engine.testing.kinds:TinyMLP",
            ),
            "TinyMLP takes numbers and tiny_sequences holds tokens",
        ),
        (("partition.features=vgg16", "dataset.pad=none"), "VGG16"),
        (("partition.rule=manual",), "partition.rule=manual needs a map"),
        (("partition.rule=manual", "partition.map=none.json"), "partition.map = none.json"),
        (("partition.features=small_cnn", "partition.clusters=5000"), "5000 clusters of"),
    ],
)
def test_what_cannot_be_dealt_by_is_told_in_a_line(quick: Sequence[str], sets: Sequence[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        cut(Resolved.load(None, [*quick, *sets]))


def test_a_check_writes_nothing(quick: Sequence[str]) -> None:
    resolved = Resolved.load(None, [*quick, *NOISE, "partition.features=small_cnn", "partition.clusters=4"])
    check(resolved)
    assert cut(resolved).clusters is not None and not Path("runs").exists()

"""Every sample is in exactly one place, by the rule, with the minimum held, and the same on every machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core import seeds
from fl_engine.core.errors import IntegrityError, PartitionError
from fl_engine.core.samples import Data
from fl_engine.data import partition_rules as rules
from fl_engine.data.partition import MANIFEST, TENSORS, Partition
from fl_engine.data.partitioning import BY_LABEL, statistics
from fl_engine.tasks import Classification
from tests.harness.jobs import dealt

pytestmark = pytest.mark.pictures

law = settings(max_examples=60)

labels_st = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(lambda y: np.array(y, dtype=np.int64))
seed_st = st.integers(0, 2**32)


def data_of(labels: np.ndarray[Any, np.dtype[np.int64]], classes: int = 10, writers: int | None = None) -> Data:
    y = torch.from_numpy(labels)
    x = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    natural = None if writers is None else torch.arange(len(labels)) % writers
    return Data("made", Classification(classes), x, y, x[:1], y[:1], (0.0,), (1.0,), natural)


TEN = data_of(np.arange(1000) % 10, writers=25)


def check_law(parts: tuple[rules.Ints, ...], samples: int) -> None:
    """Each of 0 .. samples - 1 exactly once; every part ascending int64."""
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


# --------------------------------------------------------------------------------------------------- rules
@law
@given(labels_st, st.integers(1, 40), seed_st)
def test_iid_deals_evenly(labels: rules.Ints, clients: int, seed: int) -> None:
    clients = min(clients, len(labels))
    parts = rules.iid(labels, clients, seeds.rng(seed, "test"))
    check_law(parts, len(labels))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@law
@given(labels_st, st.integers(1, 40), st.floats(1e-300, 1e300), st.integers(1, 20), seed_st)
@pytest.mark.parametrize("rule", [rules.dirichlet, rules.dirichlet_per_client, rules.quantity])
def test_rules_that_draw_sizes_hold_the_minimum(
    rule: Any, labels: rules.Ints, clients: int, alpha: float, minimum: int, seed: int
) -> None:
    clients = min(clients, len(labels))
    minimum = min(minimum, len(labels) // clients)
    parts = rule(labels, clients, alpha, minimum, seeds.rng(seed, "test"))
    check_law(parts, len(labels))
    assert min(map(len, parts)) >= minimum


@law
@given(labels_st, st.integers(1, 40), st.integers(1, 6), seed_st)
def test_disjoint_labels_gives_exactly_so_many_labels(labels: rules.Ints, clients: int, each: int, seed: int) -> None:
    classes, samples = np.unique(labels, return_counts=True)
    possible = clients <= len(labels) and each <= len(classes) <= clients * each <= np.minimum(samples, clients).sum()
    if not possible:
        with pytest.raises(PartitionError):
            rules.disjoint_labels(labels, clients, each, seeds.rng(seed, "test"))
        return
    parts = rules.disjoint_labels(labels, clients, each, seeds.rng(seed, "test"))
    check_law(parts, len(labels))
    assert all(len(np.unique(labels[part])) == each for part in parts)
    for label in classes:  # dealt evenly to its holders
        held = [int((labels[part] == label).sum()) for part in parts if (labels[part] == label).any()]
        assert max(held) - min(held) <= 1


@law
@given(st.lists(st.integers(-3, 30), min_size=1, max_size=100), st.integers(1, 40))
def test_natural_splits_no_group(groups: list[int], clients: int) -> None:
    array = np.array(groups, dtype=np.int64)
    clients = min(clients, len(set(groups)))
    parts = rules.natural(array, clients)
    check_law(parts, len(array))
    assert len(parts) == clients
    assert sum(len(np.unique(array[part])) for part in parts) == len(set(groups))


@law
@given(st.integers(2, 500), st.floats(0, 1, exclude_max=True), seed_st)
def test_split_proxy_parts_are_disjoint(samples: int, share: float, seed: int) -> None:
    size = int(samples * share + 0.5)
    if share > 0 and size < 2:
        with pytest.raises(PartitionError):
            rules.split_proxy(samples, share, seeds.rng(seed, "test"))
        return
    train, test, rest = rules.split_proxy(samples, share, seeds.rng(seed, "test"))
    check_law((train, test, rest), samples)
    assert len(train) + len(test) == size
    if size:
        assert len(train) >= 1
        assert len(test) == max(1, int(size * 0.2 + 0.5))


class Scripted:
    """A generator that shuffles nothing, and draws these shares one after the other."""

    def __init__(self, *shares: tuple[float, ...]) -> None:
        self.shares = list(shares)

    def permutation(self, of: Any) -> rules.Ints:
        return np.array(of) if np.ndim(of) else np.arange(of)

    def dirichlet(self, alpha: object) -> np.ndarray[Any, Any]:
        return np.array(self.shares.pop(0))

    def random(self, n: int) -> np.ndarray[Any, Any]:
        return np.full(n, 0.5)


@pytest.mark.parametrize(
    ("of_class_0", "of_class_1", "without", "capped"),
    [
        # Client 0 has its 4 of 8 samples when class 1 is dealt, and gets none of it.
        ((1.0, 0.0), (0.75, 0.25), [[4, 0], [3, 1]], [[4, 0], [0, 4]]),
        # Client 0 has 3, so it still gets its half of class 1, and ends above 4.
        ((0.75, 0.25), (0.5, 0.5), [[3, 1], [2, 2]], [[3, 1], [2, 2]]),
        # The only client below the cap has a share of 0, and gets all the same.
        ((1.0, 0.0), (1.0, 0.0), [[4, 0], [4, 0]], [[4, 0], [0, 4]]),
    ],
)
def test_the_cap_by_hand(
    of_class_0: tuple[float, ...], of_class_1: tuple[float, ...], without: list[list[int]], capped: list[list[int]]
) -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    for cap, wanted in ((False, without), (True, capped)):
        rng: Any = Scripted(of_class_0, of_class_1)
        owner = rules.dealt_by_label(labels, 2, 1.0, rng, cap)
        assert [[int((owner[labels == c] == k).sum()) for k in range(2)] for c in range(2)] == wanted


def test_dirichlet_per_client_by_hand() -> None:
    """Client 0 gets 6 of 8 samples and wants class 0: all 4 of it, then 2 of what is left. Client 1 wants class 1."""
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    rng: Any = Scripted((0.75, 0.25), (1.0, 0.0), (0.0, 1.0))
    parts = rules.dirichlet_per_client(labels, 2, 1.0, 1, rng)
    assert [np.bincount(labels[part], minlength=2).tolist() for part in parts] == [[4, 2], [0, 2]]
    # With a minimum of 4, two of its places go to client 1.
    rng = Scripted((0.75, 0.25), (1.0, 0.0), (0.0, 1.0))
    parts = rules.dirichlet_per_client(labels, 2, 1.0, 4, rng)
    assert [np.bincount(labels[part], minlength=2).tolist() for part in parts] == [[4, 0], [0, 4]]


# ----------------------------------------------------------------------------------------------- partition
CASES: dict[str, dict[str, Any]] = {
    rule: {"rule": rule, "clients": 20, "proxy": 0.05, "seed": 7, **own}
    for rule, own in {
        "iid": {},
        "dirichlet": {"alpha": 0.3, "minimum": 15},
        "quantity": {"alpha": 0.3, "minimum": 5},
        "disjoint_labels": {"labels_per_client": 3},
        "natural": {},
        "dirichlet_per_client": {"alpha": 0.3, "minimum": 15},
        "manual": {"owner": np.arange(1000) // 50},
    }.items()
}
CASES["capped"] = {**CASES["dirichlet"], "cap": True}
GOLDEN = {
    "iid": "b1adac7e0aae8e93b5aa4900c26183c650c93554802e7880b0eaacfa97e06bba",
    "dirichlet": "36bf600645dd5d4f7062fefb05d3b0691d80ce8d59c01654b5a54ec95c9596c2",
    "capped": "a3c84fab20157c157f30d6167c82923c094f7335ee099808201e4a9d0769e2da",
    "quantity": "33e4d377b443e1f444008cb8e7a3a5a27e5cbaef125f6cb26ae41c39542da547",
    "disjoint_labels": "0e608ffdb410272aa28752b30e6b2ac8eaf59cb5103ff8450c44c1770c6ba637",
    "natural": "939ae0af49b99ca3445587c7cd5ae339a88a6e0a116040d49e07a6a29dc35e92",
    "dirichlet_per_client": "12fa481acb023ee5a75f8fb341e0e2f406561b61e0f06aea0de08a4497f5085d",
    "manual": "40a2f8c55d7f0c30e9af20948613d4da9a0fb3e30e170d2c0df2272e93afb212",
}


def digest(partition: Partition) -> str:
    lists = [part.tolist() for part in (partition.proxy_train, partition.proxy_test, *partition.clients)]
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()


@pytest.mark.parametrize("rule", CASES)
def test_golden(rule: str) -> None:
    """The same seed gives the same partition on every machine. A change breaks every stored comparison."""
    assert digest(dealt(TEN, **CASES[rule])) == GOLDEN[rule]


@pytest.mark.parametrize("rule", CASES)
@given(seed=st.integers(0, 2**63))
@settings(max_examples=8)
def test_every_sample_is_in_exactly_one_place(rule: str, seed: int) -> None:
    arguments = {**CASES[rule], "seed": seed}
    cut = dealt(TEN, **arguments)
    check_law((cut.proxy_train, cut.proxy_test, *cut.clients), 1000)
    assert (len(cut.proxy_train), len(cut.proxy_test), len(cut.clients)) == (40, 10, 20)
    assert min(map(len, cut.clients)) >= arguments.get("minimum", 1)
    assert np.array_equal(cut.counts, statistics(cut.clients, TEN.train_y.numpy(), 10))
    assert cut.counts.sum() == 950
    assert digest(dealt(TEN, **arguments)) == digest(cut)


# ---------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "change",
    [
        {"clients": 951},
        {"minimum": 48},
        {"rule": "dirichlet", "alpha": 0.0},
        {"rule": "dirichlet", "alpha": float("nan")},
        {"rule": "manual"},
        {"rule": "manual", "owner": np.arange(1000) % 5},
        {"rule": "manual", "owner": np.arange(1000) // 995, "clients": 2, "minimum": 6},
        {"rule": "disjoint_labels", "labels_per_client": 2, "clients": 4},
        {"rule": "natural", "clients": 26},
        {"proxy": 1.0},
        {"proxy": 0.001},
    ],
)
def test_impossible_partition_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(PartitionError, match="partition"):
        dealt(TEN, **{**CASES["iid"], **change})


def test_a_proxy_that_takes_all_of_a_client_is_refused() -> None:
    data = data_of(np.arange(40) % 10, writers=21)
    with pytest.raises(PartitionError):
        dealt(data, "natural", 21, 0.4, 0)
    assert len(dealt(data, "natural", 21, 0.0, 0).clients) == 21


# ------------------------------------------------------------------------------------------------- storage
def test_saved_and_loaded_are_equal(tmp_path: Path) -> None:
    for rule, case in CASES.items():
        cut = dealt(TEN, **case)
        assert cut.save(tmp_path / rule) == tmp_path / rule / "partition.json"
        cut.save(tmp_path / "again")
        for name in (MANIFEST, TENSORS):
            assert (tmp_path / rule / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        back = Partition.load(tmp_path / rule, TEN)
        assert digest(back) == digest(cut)
        assert (back.rule, back.parameters, back.data) == (cut.rule, cut.parameters, cut.data)
        assert np.array_equal(back.counts, cut.counts)
        assert back.clients[0].dtype == np.int64
        assert sorted(path.name for path in (tmp_path / rule).iterdir()) == [MANIFEST, TENSORS]
    no_proxy = dealt(TEN, "iid", 10, 0, 1)
    no_proxy.save(tmp_path / "no proxy")
    assert digest(Partition.load(tmp_path / "no proxy")) == digest(no_proxy)


CLUSTERS = np.arange(1000) // 100
"""Ten, unlike TEN's classes."""


@pytest.mark.parametrize("rule", BY_LABEL)
def test_clusters_are_dealt_as_labels_are(rule: str, tmp_path: Path) -> None:
    cut = dealt(TEN, **CASES[rule], clusters=CLUSTERS)
    assert cut.label == "cluster" and np.array_equal(cut.counts, statistics(cut.clients, CLUSTERS, 10))
    by_cluster = data_of(CLUSTERS)
    assert digest(cut) == digest(dealt(by_cluster, **CASES[rule])) != digest(dealt(TEN, **CASES[rule]))
    cut.save(tmp_path)
    found = Partition.load(tmp_path, TEN)
    assert np.array_equal(found.clusters, CLUSTERS) and found.label == "cluster"
    assert np.array_equal(found.counts, cut.counts)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert (manifest["label"], manifest["clusters"]) == ("cluster", 1000)


def test_a_partition_of_other_data_is_refused(tmp_path: Path) -> None:
    dealt(TEN, **CASES["iid"]).save(tmp_path)
    with pytest.raises(PartitionError):
        Partition.load(tmp_path, data_of(np.arange(1000) % 10))


def test_damage_is_an_integrity_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(PartitionError):
        Partition.load(tmp_path)
    dealt(TEN, **CASES["iid"]).save(tmp_path)
    tensors, manifest = tmp_path / TENSORS, tmp_path / MANIFEST
    content, text = tensors.read_bytes(), manifest.read_text()

    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(IntegrityError):
        Partition.load(tmp_path)
    tensors.unlink()
    with pytest.raises(IntegrityError):
        Partition.load(tmp_path)
    tensors.write_bytes(content)

    for wrong in (
        text[:-20],
        text.replace('"rule"', '"role"'),
        text.replace('"schema_version": 1', '"schema_version": 2'),
    ):
        assert wrong != text
        manifest.write_text(wrong)
        with pytest.raises(IntegrityError):
            Partition.load(tmp_path)

"""Clients' labels are made wrong as the matrix says, as often as asked for, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core import seeds
from fl_engine.core.samples import Data
from fl_engine.data import partitioning as p
from fl_engine.data.partition import MANIFEST, NoiseFigures, Partition, read_manifest
from fl_engine.data.partitioning import hold_out, with_noise
from fl_engine.preparation.confusion import measure_confusion
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, tiny_data
from tests.harness.jobs import dealt

CONFUSION = np.array([[6, 3, 1], [0, 19, 1], [2, 0, 8]])
"""Class 1 is recognised in 95 of 100 cases."""


def test_what_a_label_becomes_by_hand() -> None:
    found = p.likely_mistakes(CONFUSION, sure=0.95)
    assert found.tolist() == [[0, 0.75, 0.25], [0, 0, 0], [1, 0, 0]]
    assert p.likely_mistakes(CONFUSION, sure=0.96)[1].tolist() == [0, 0, 1]
    assert p.likely_mistakes(np.array([[0, 0], [1, 1]]), 0.95).tolist() == [[0, 0], [1, 0]], "never seen: left"
    assert p.likely_mistakes(np.array([[0, 9], [0, 9]]), 1.0).tolist() == [[0, 0], [0, 0]], "always one class: left"
    assert p.likely_mistakes(CONFUSION, 1.0, unknown=(2,)).tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]


def test_noise_by_hand() -> None:
    """Client 0 holds class 0, client 1 class 1, which is left; of client 2's 4 samples int(.3 * 4) = 1 is wrong."""
    targets = np.array([0] * 4000 + [1] * 50 + [2] * 4)
    clients = (np.arange(4000), np.arange(4000, 4050), np.arange(4050, 4054))
    figures, labels = p.draw_noise(targets, clients, p.likely_mistakes(CONFUSION, 0.95), 0.3, seed=1)
    assert figures == NoiseFigures(share=0.3, wrong=(1200, 0, 1), held_out=0)
    assert figures.reached(4054) == 1201 / 4054
    became = np.bincount(labels[0], minlength=3)
    assert became[0] == 2800 and abs(became[1] - 900) < 60, "three in four of them class 1"
    assert labels[1].tolist() == [1] * 50
    assert sorted(labels[2].tolist()) == [0, 2, 2, 2]


law = settings(max_examples=40)


@law
@given(st.data())
def test_noise_is_where_it_may_be_and_the_same_for_a_seed(data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 5))
    rows = st.lists(st.integers(0, 30), min_size=classes, max_size=classes)
    confusion = np.array(data.draw(st.lists(rows, min_size=classes, max_size=classes)))
    targets = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=80)))
    share, seed = data.draw(st.floats(0.01, 1)), data.draw(st.integers(0, 2**40))
    clients = tuple(np.sort(part) for part in np.array_split(np.arange(len(targets)), 3))
    mistakes = p.likely_mistakes(confusion, 0.95)
    assert np.isclose(mistakes.sum(1), 1).tolist() == mistakes.any(1).tolist()
    assert not mistakes.diagonal().any()
    figures, labels = p.draw_noise(targets, clients, mistakes, share, seed)
    _, again = p.draw_noise(targets, clients, mistakes, share, seed)
    for indices, held, same, wrong in zip(clients, labels, again, figures.wrong, strict=True):
        assert held.tolist() == same.tolist()
        differ = held != targets[indices]
        assert differ.sum() == wrong <= int(len(indices) * share)
        assert (mistakes[targets[indices][differ], held[differ]] > 0).all()
    # A client's noise does not depend on what others hold.
    _, alone = p.draw_noise(targets, (clients[0], clients[1][:0], clients[2][:0]), mistakes, share, seed)
    assert alone[0].tolist() == labels[0].tolist()


def test_labels_that_a_client_does_not_train_on_stay_right() -> None:
    """int(.5 * 8) of the 8 samples that a client of 10 trains on are wrong."""
    targets = np.arange(23) % 2
    clients, mistakes = (np.arange(10), np.arange(10, 20), np.arange(20, 23)), 1.0 - np.eye(2)
    x, y = torch.rand(23, 2), torch.from_numpy(targets)
    data = Data("two", Classification(2), x, y, x, y)
    parts = replace(dealt(data, "iid", 3, 0.0, 0), clients=clients, counts=np.array([[5, 5, 2], [5, 5, 1]]))
    trained, held = hold_out(parts, 0.2, seed=1, data=data)
    figures, noisy = p.draw_noise(targets, clients, mistakes, 0.5, 1, held)
    assert [len(each) for each in held] == [2, 2, 0]
    assert figures == NoiseFigures(share=0.5, wrong=(4, 4, 1), held_out=4) and figures.reached(23) == 9 / 19
    told = with_noise(data, replace(parts, noise=figures, noisy=noisy)).train_y.numpy()
    wrong = np.flatnonzero(told != targets)
    assert np.isin(wrong, np.concatenate(trained.clients)).all() and len(wrong) == 9


def test_confusion_has_a_row_for_each_true_class() -> None:
    data, family = tiny_data(), TinyNet()
    matrix = measure_confusion(family, data, seed=3, epochs=1, lr=1e-30, batch_size=16)
    held_out = seeds.rng(3, "confusion").permutation(len(data.train_y))[: matrix.sum()]
    of_class = np.bincount(data.train_y.numpy()[held_out], minlength=family.outputs)
    assert matrix.sum(1).tolist() == of_class.tolist() != matrix.sum(0).tolist()


def test_noisy_partition_is_stored_with_the_clients_labels(tmp_path: Path) -> None:
    data = tiny_data()
    parts, mistakes = dealt(data, "iid", 4, 0.1, 0), (1.0 - np.eye(data.task.outputs)) / (data.task.outputs - 1)
    figures, noisy = p.draw_noise(data.train_y.numpy(), parts.clients, mistakes, 0.5, 0)
    parts = replace(parts, noise=figures, noisy=noisy)
    parts.save(tmp_path)
    found = Partition.load(tmp_path, data)
    assert found.noise == parts.noise is not None
    told = with_noise(data, found)
    for indices, held in zip(parts.clients, parts.noisy, strict=True):
        assert told.train_y[indices].tolist() == held.tolist()
    own = np.concatenate([parts.proxy_train, parts.proxy_test])
    assert torch.equal(told.train_y[own], data.train_y[own]), "the server's labels are right"
    assert torch.equal(told.test_y, data.test_y) and torch.equal(told.train_x, data.train_x)
    assert (read_manifest(tmp_path / MANIFEST).reached or 0) > 0.4

"""Flips and crops on images that a person can check, seeded by client and step, in training alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.algorithms import FedAvg
from fl_engine.core.augmentation import AUGMENTATIONS, Augmentation, Crop, Flip
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, LocalTask
from fl_engine.exchange.client import execute
from fl_engine.tasks import Classification
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.tiny import SEED, TRAINING, context_of, start_of, tiny_site
from fl_engine.training import batches
from fl_engine.training.local import TrainingJob, train

TASK = LocalTask(FULL, SGD(0.1), epochs=2, batch_size=4, drop_last=True, seed=5)
SMALL = torch.arange(1.0, 7.0).view(1, 1, 2, 3)
"""1 2 3 over 4 5 6."""


def applied(augmentation: Augmentation, x_bchw: Tensor) -> Tensor:
    return augmentation.apply(x_bchw, torch.zeros(len(x_bchw)), torch.Generator().manual_seed(0))[0]


def test_a_flip_mirrors_left_to_right() -> None:
    mirrored = torch.tensor([[[[3.0, 2.0, 1.0], [6.0, 5.0, 4.0]]]])
    assert torch.equal(applied(Flip(share=1.0), SMALL), mirrored)
    many = applied(Flip(), SMALL.repeat(4000, 2, 1, 1))
    flipped = (many == mirrored).flatten(1).all(1)
    assert bool((flipped ^ (many == SMALL).flatten(1).all(1)).all()), "a sample is mirrored as a whole, or not at all"
    assert float(flipped.float().mean()) == pytest.approx(0.5, abs=0.03)
    few = applied(Flip(share=0.1), SMALL.repeat(4000, 1, 1, 1))
    assert float((few == mirrored).flatten(1).all(1).float().mean()) == pytest.approx(0.1, abs=0.02)


def windows(padding: int) -> dict[tuple[float, ...], tuple[int, int]]:
    """All crops of SMALL, by their pixels: how far down and right the window lies."""
    down = range(-padding, padding + 1)
    at = {(r, c): SMALL[0, 0, r, c].item() for r in range(2) for c in range(3)}
    return {
        tuple(at.get((r + dr, c + dc), 0.0) for r in range(2) for c in range(3)): (dr, dc) for dr in down for dc in down
    }


def test_a_crop_is_a_window_beside_the_image() -> None:
    """With a border of one pixel, nine windows: one down and one right is 5 6 0 over 0 0 0."""
    known = windows(1)
    assert known[5, 6, 0, 0, 0, 0] == (1, 1) and known[0, 0, 0, 0, 1, 2] == (-1, -1) and len(known) == 9
    found = [known[tuple(each.flatten().tolist())] for each in applied(Crop(padding=1), SMALL.repeat(900, 1, 1, 1))]
    counts = [found.count(place) for place in known.values()]
    assert min(counts) > 60 and max(counts) < 145, counts


def changed(x: Tensor, chosen_bn: Tensor, tasks: list[LocalTask], step: int) -> Tensor:
    """The samples of a step whose targets are classes, which stay as they are."""
    y = torch.arange(len(x))
    found, targets = batches.gathered(Classification(len(x)), x, y, chosen_bn, tasks, step)
    assert torch.equal(targets, y[chosen_bn])
    return found


def test_a_steps_changes_follow_from_seed_place_and_step() -> None:
    x, chosen = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6)[:, None]
    task = replace(TASK, augment=(Crop(padding=2), Flip()))
    alone = changed(x, chosen, [task], 7)
    assert torch.equal(changed(x, chosen, [task], 7), alone)
    other = replace(task, seed=6)
    beside = changed(x, chosen.repeat(1, 3), [other, task, other], 7)
    assert beside.shape == (6, 3, 8, 8) and torch.equal(beside[:, 1:2], alone)
    assert not torch.equal(beside[:, :1], alone)
    assert not torch.equal(changed(x, chosen, [task], 8), alone)
    twice = changed(x, chosen, [replace(task, augment=(Crop(padding=2), Crop(padding=2)))], 7)
    once = changed(x, chosen, [replace(task, augment=(Crop(padding=2),))], 7)
    assert not torch.equal(places(x, once), places(once, twice)), "the second crop draws places of its own"
    assert torch.equal(changed(x, chosen, [TASK], 7), x)


def places(x: Tensor, cropped: Tensor) -> Tensor:
    """int64 (B, 2): how far down and right the window of each sample lies."""
    padded, all_places = F.pad(x, (2, 2, 2, 2)), [(down, right) for down in range(5) for right in range(5)]
    found = [
        next(p for p in all_places if torch.equal(padded[i, :, p[0] : p[0] + 8, p[1] : p[1] + 8], cropped[i]))
        for i in range(len(x))
    ]
    return torch.tensor(found)


@dataclass(frozen=True)
class Recorded:
    seen: tuple[list[Tensor], ...] = ([],)

    def __hash__(self) -> int:
        return 0

    def check(self, x: Tensor) -> None:
        pass

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        self.seen[0].append(x_bchw.clone())
        return x_bchw, y


def test_every_training_batch_is_augmented_and_nothing_else() -> None:
    recorded = Recorded(([],))
    training = replace(TRAINING, augment=(recorded,))
    algorithm = FedAvg(training=training, eligible="all")
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0, SEED))
    results = [execute(algorithm, assignment, site) for assignment in plan.assignments]
    assert len(recorded.seen[0]) == len(results) * 2 * 2, "two epochs of two batches"
    assert all(batch.shape == (4, 1, 4, 4) for batch in recorded.seen[0])


@pytest.mark.parametrize("augmentation", [kind() for kind in AUGMENTATIONS.values()], ids=list(AUGMENTATIONS))
@pytest.mark.parametrize("kind", ["regression", "tokens"])
def test_augmentation_refuses_samples_that_are_not_images(augmentation: Augmentation, kind: str) -> None:
    family, data = KINDS[kind]
    task, name = replace(TASK, augment=(augmentation,)), augmentation.name  # type: ignore[attr-defined]
    job = TrainingJob(task, initial_params(family, 1), data.normalise(data.train_x[:8]), data.train_y[:8])
    with pytest.raises(ModelError, match=rf"training\.augment: {name} "):
        train(family, data.task, [job])

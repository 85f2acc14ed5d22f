"""Local training against steps written out by hand, and a client's whole order: samples, seeds, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import (
    FULL,
    SGD,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Device,
    Distillation,
    LocalTask,
    Params,
    SubmodelSpec,
)
from fl_engine.exchange import client
from fl_engine.exchange.client import execute
from fl_engine.models.chains import SmallCNN
from fl_engine.tasks import Classification
from fl_engine.testing.kinds import TinyLSTM
from fl_engine.testing.tiny import SEED, TinyNet, assert_same_bits, context_of, start_of, tiny_fleet, tiny_site
from fl_engine.training import local
from fl_engine.training.lanes import Dropout
from fl_engine.training.local import Trained, TrainingJob, train
from tests.harness.networks import Watched

FAMILY = TinyNet()


def samples(count: int, chw: tuple[int, int, int] = (1, 4, 4)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, *chw, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)


def task_of(count: int = 8, **changes: object) -> LocalTask:
    plain = LocalTask(FULL, SGD(0.1), epochs=1, batch_size=count, drop_last=True, seed=11)
    return replace(plain, **changes)  # type: ignore[arg-type]


def trained(task: LocalTask, count: int = 8, family: ModelFamily = FAMILY, start: Params | None = None) -> Trained:
    start = initial_params(family, 1) if start is None else start
    (found,) = train(
        family, Classification(family.outputs), [TrainingJob(task, start, *samples(count, family.input_shape))]
    )
    return found


# ------------------------------------------------------------------------------------------------ optimiser
# -------------------------------------------------------------------------------------------------- batches
@pytest.mark.parametrize(
    ("count", "batch", "drop_last", "sizes"),
    [
        (23, 10, True, [10, 10]),
        (23, 10, False, [10, 10, 3]),
        (7, 10, True, [7]),
    ],
)
def test_batches_of_an_epoch(count: int, batch: int, drop_last: bool, sizes: list[int]) -> None:
    """The last partial batch is dropped, unless it is the only one: a small client trains all the same."""
    watched = Watched(FAMILY)
    found = trained(task_of(batch_size=batch, drop_last=drop_last, epochs=3), count, watched)  # type: ignore[arg-type]
    assert [len(b) for b in watched.batches] == sizes * 3
    assert found.steps == 3 * len(sizes)
    every = set(map(tuple, samples(count)[0].flatten(1).tolist()))
    epochs = torch.cat(watched.batches).flatten(1).view(3, sum(sizes), -1)
    assignments = [list(map(tuple, epoch.tolist())) for epoch in epochs]
    for assignment in assignments:
        assert len(set(assignment)) == len(assignment), "a sample twice in one epoch"
        assert set(assignment) <= every
    if count > 3:
        assert len(set(map(tuple, assignments))) == 3, "every epoch has its own order"


# --------------------------------------------------------------------------------------------- determinism
@pytest.mark.parametrize("family", [FAMILY, TinyNet(dropout=0.5), SmallCNN((1, 8, 8), 4, width=0.25)], ids=str)
def test_bits_depend_on_the_job_alone(family: ModelFamily) -> None:
    start, (x, y) = initial_params(family, 1), samples(20, family.input_shape)
    jobs = [TrainingJob(task_of(batch_size=6, epochs=2, seed=seed), start, x, y) for seed in (1, 2, 3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    together = [found.params for found in train(family, Classification(family.outputs), jobs)]
    assert torch.equal(torch.get_rng_state(), before), "the global generator was moved"
    torch.manual_seed(2)
    for params, job in zip(together, jobs, strict=True):
        (alone,) = train(family, Classification(family.outputs), [job])
        assert_same_bits(alone.params, params)
    assert not torch.equal(together[0]["classifier.weight"], together[1]["classifier.weight"])


def test_dropout_drops_a_quarter_and_scales_the_rest() -> None:
    def dropout(*lanes: int) -> Dropout:
        layer = Dropout(0.25)
        layer.generators = [torch.Generator().manual_seed(seed) for seed in lanes]
        return layer

    layer, x = dropout(3), torch.ones(1, 4000)
    first = layer(x)
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert not torch.equal(layer(x), first), "a new mask for every batch"
    both = dropout(8, 3)(torch.ones(1, 8000))
    assert torch.equal(both[:, 4000:], first)
    assert not torch.equal(both[:, :4000], first)
    assert torch.equal(layer.eval()(x), x)


def test_copied_weights_of_teachers_are_current() -> None:
    family = TinyLSTM()
    job = TrainingJob(
        task_of(1, epochs=2, optimizer=SGD(0.3), distillation=Distillation((SubmodelSpec.of({"lstm": 5}),), 10.0, 3.0)),
        initial_params(family, 1),
        torch.randn(1, *family.input_shape, generator=torch.Generator().manual_seed(1)),
        torch.tensor([1]),
    )
    (expected,) = train(family, Classification(3), [job])
    one = replace(job, task=replace(job.task, epochs=1))
    (first,) = train(family, Classification(3), [one])
    (second,) = train(family, Classification(3), [replace(one, start=first.params)])
    assert_same_bits(second.params, expected.params)
    assert not any(torch.equal(first.params[name], tensor) for name, tensor in job.start.items())


# -------------------------------------------------------------------------------------- static batch norm
@pytest.mark.parametrize("training", [True, False])
def test_teachers_do_not_change_running_statistics(training: bool) -> None:
    family = SmallCNN((1, 8, 8), 4, width=0.5, norm="static")
    halves = {g: n // 2 for g, n in family.layout().groups.items() if g != "classes"}
    teachers = (SubmodelSpec.of({g: max(1, n // 2) for g, n in halves.items()}), SubmodelSpec.of(halves))
    alone = trained(task_of(4, epochs=3, optimizer=SGD(1e-30)), 16, family)
    kd = Distillation(teachers, 10.0, 3.0, training=training)
    taught = trained(task_of(4, epochs=3, optimizer=SGD(1e-30), distillation=kd), 16, family)
    other = replace(kd, training=not training)
    assert taught.loss == trained(task_of(4, epochs=3, optimizer=SGD(1e-30), distillation=other), 16, family).loss
    assert taught.loss > alone.loss, "the teachers did run"
    start = initial_params(family, 1)
    running = [n for n in start if n.endswith(("running_mean", "running_var"))]
    assert len(running) == 6
    assert_same_bits({n: taught.params[n] for n in running}, {n: alone.params[n] for n in running})
    assert not any(torch.equal(alone.params[n], start[n]) for n in running)


# ------------------------------------------------------------------------------------- a client's assignment
PLAIN = FedAvg(training=Training(fraction=1.0, epochs=2, batch_size=4, lr=0.05), eligible="all")


def result(algorithm: FedAvg | FlexFL, client: int = 0, **site: object) -> ClientUpdate | ClientFailure:
    place = tiny_site(algorithm, fleet=tiny_fleet(4), **site)  # type: ignore[arg-type]
    plan = algorithm.plan(start_of(algorithm, place), context_of(place, 2, SEED))
    (assignment,) = (o for o in plan.assignments if o.client == client)
    return execute(algorithm, assignment, place)


def test_client_without_samples_fails() -> None:
    found = result(PLAIN, client=1, sizes=(8, 0, 8, 8))
    assert isinstance(found, ClientFailure)
    assert (found.round, found.client, found.stage) == (2, 1, "train")


def test_diverged_training_is_a_failure() -> None:
    lr = 1e30
    wild = replace(PLAIN, training=Training(fraction=1.0, epochs=6, batch_size=4, lr=lr, lr_decay=1.0))
    found = result(wild)
    assert isinstance(found, ClientFailure)
    assert found.stage == "train"
    assert f"learning rate {lr:g}" in found.reason


class Failing(Watched):
    """A family whose networks do this first whenever they run."""

    def __init__(self, inner: ModelFamily, what: Callable[[], None]) -> None:
        super().__init__(inner)
        self.what = what

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        def fail(*_: object) -> None:
            self.what()

        module = self.inner.module(spec)
        module.register_forward_pre_hook(fail)
        return module


def executed(what: Callable[[], None], evaluates: bool = False) -> ClientResult:
    """Execute an assignment whose network does this."""
    site = tiny_site(PLAIN, fleet=tiny_fleet(4))
    assignment = PLAIN.plan(start_of(PLAIN, site), context_of(site, 0, SEED)).assignments[0]
    held = tuple(np.arange(4) for _ in site.partition.clients) if evaluates else ()
    site = replace(site, family=Failing(FAMILY, what), held=held)  # type: ignore[arg-type]
    return execute(PLAIN, replace(assignment, evaluates=evaluates), site)


def of_a_gpu() -> None:
    raise torch.OutOfMemoryError("out of memory: tried to allocate 9 GiB")


def of_a_cpu() -> None:
    torch.empty(10**15)  # more than there are addresses


@pytest.mark.parametrize("evaluates", [False, True], ids=["trains", "evaluates"])
@pytest.mark.parametrize("lack", [of_a_gpu, of_a_cpu])
def test_client_out_of_memory_is_a_failure(lack: Callable[[], None], evaluates: bool) -> None:
    found = executed(lack, evaluates)
    assert isinstance(found, ClientFailure)
    assert found.stage == ("evaluate" if evaluates else "train")
    assert "out of memory" in found.reason


def of_batch_norm() -> None:
    F.batch_norm(torch.zeros(1, 3), None, None, training=True)


def test_value_that_torch_refuses_is_a_client_failure(caplog: pytest.LogCaptureFixture) -> None:
    found = executed(of_batch_norm)
    assert isinstance(found, ClientFailure) and found.stage == "train"
    assert found.reason in caplog.text and "in of_batch_norm" in caplog.text


def of_a_view() -> None:
    torch.zeros(4).view(3)


def of_an_accelerator() -> None:
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("lack", [of_a_view, of_an_accelerator])
def test_errors_of_code_or_machine_are_not_client_failures(lack: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError):
        executed(lack)


@pytest.mark.parametrize("lack", [of_a_gpu, of_a_cpu])
def test_clients_out_of_memory_together_train_one_by_one(
    lack: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tiny_site(PLAIN, fleet=tiny_fleet(4))
    assignments = PLAIN.plan(start_of(PLAIN, site), context_of(site, 0, SEED)).assignments[:2]
    alone, together = local.train, []

    def room_for_one(family: Any, task: Any, jobs: Any, *more: Any, **options: Any) -> Any:
        if len(jobs) > 1:
            together.append(len(jobs))
            lack()
        return alone(family, task, jobs, *more, **options)

    monkeypatch.setattr(local, "train", room_for_one)
    found = client.train([client.accept(PLAIN, assignment, site) for assignment in assignments], site)
    assert together == [2] and [type(result) for result in found] == [ClientUpdate, ClientUpdate]


def test_too_small_device_fails_in_pruning() -> None:
    algorithm = FlexFL(training=PLAIN.training, on_too_small="fail")
    place = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 110.0, 0.0) for c in range(3)))
    assignment = algorithm.plan(start_of(algorithm, place), context_of(place, 0, SEED)).assignments[0]
    weak = replace(place, fleet=(Device(0, "weak", 5.0, 0.0), *place.fleet[1:]))
    found = execute(algorithm, assignment, weak)
    assert isinstance(found, ClientFailure)
    assert (found.client, found.stage) == (0, "prune")
    assert "5 %" in found.reason

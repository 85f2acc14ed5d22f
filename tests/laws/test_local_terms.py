"""What a task may add to plain training, against the gradient worked out by hand: one step of SGD with rate 1 on one
batch, so that the parameters move by the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.algorithms import HeteroFL
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import macs_per_sample
from fl_engine.core.slicing import initial_params, is_statistic, take
from fl_engine.core.types import (
    FULL,
    SGD,
    ClientUpdate,
    Distillation,
    ExitLoss,
    LocalTask,
    Params,
    Sandwich,
    SubmodelSpec,
)
from fl_engine.core.widths import prefix
from fl_engine.exchange.client import execute
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds.server import ServerSite
from fl_engine.tasks import Classification, Regression
from fl_engine.testing.tiny import SEED, TRAINING, TinyNet, assert_same_bits, context_of, start_of, tiny_site
from fl_engine.training.local import Trained, TrainingJob, train
from fl_engine.training.losses import distil_from_last, distil_mutually, of_exits

FAMILY = TinyNet()
FOUR, TWO = Classification(4), Classification(2)
START = initial_params(FAMILY, 1)


def samples(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.tensor([0, 1, 3, 1, 0, 3, 3, 1])[:count]


def one_step(
    family: ModelFamily = FAMILY, start: Params = START, linear: Params | None = None, **changes: object
) -> Trained:
    task = replace(LocalTask(FULL, SGD(1.0), epochs=1, batch_size=8, drop_last=True, seed=11), **changes)  # type: ignore[arg-type]
    (found,) = train(family, Classification(family.outputs), [TrainingJob(task, start, *samples(), linear or {})])
    return found


def moved(found: Trained, start: Params = START) -> Params:
    """The gradient that the step followed."""
    return {name: start[name] - t for name, t in found.params.items()}


def gradient_of(
    loss_of: Callable[[Tensor | tuple[Tensor, ...], Tensor], Tensor],
    family: ModelFamily = FAMILY,
    start: Params = START,
) -> Params:
    leaves = {name: t.detach().clone().requires_grad_(True) for name, t in start.items()}
    x, y = samples()
    loss = loss_of(torch.func.functional_call(family.module().train(), leaves, (x,)), y)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def assert_close(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)


def test_proximal_term_pulls_towards_the_start() -> None:
    mu, rate = 0.7, 0.3
    sgd = SGD(rate)
    once = one_step(optimizer=sgd)
    twice, pulled = (one_step(optimizer=sgd, epochs=2, proximal=p) for p in (0.0, mu))
    assert_same_bits(one_step(optimizer=sgd, proximal=mu).params, once.params)
    for name, start in START.items():
        expected = twice.params[name] - rate * mu * (once.params[name] - start)
        torch.testing.assert_close(pulled.params[name], expected, rtol=1e-5, atol=1e-6)


def test_linear_term_is_subtracted_from_the_gradient() -> None:
    """FedDyn: grad F - g, for the parameters that have a g."""
    g = {"fc.linear.bias": torch.full_like(START["fc.linear.bias"], 0.25), "not there": torch.ones(3)}
    plain, pushed = moved(one_step()), moved(one_step(linear=g))
    for name in START:
        expected = plain[name] - g[name] if name in g else plain[name]
        torch.testing.assert_close(pushed[name], expected, rtol=1e-5, atol=1e-6)


def test_gradient_is_clipped_over_all_parameters() -> None:
    plain = moved(one_step())
    norm = math.sqrt(sum(float(g.square().sum()) for g in plain.values()))
    clipped = moved(one_step(clip_norm=norm / 2))
    assert_close(clipped, {name: g / 2 for name, g in plain.items()})
    assert_close(moved(one_step(clip_norm=2 * norm)), plain)


def test_rows_of_absent_classes_are_not_returned() -> None:
    algorithm = HeteroFL(training=TRAINING, scaler=False, static_bn=False)
    site = tiny_site(algorithm)
    own = torch.from_numpy(site.partition.clients[5])
    labels = site.data.train_y.clone()
    labels[own] = torch.tensor([0, 3, 0, 3, 3, 0, 0, 3])
    site = replace(site, data=replace(site.data, train_y=labels))
    state = start_of(algorithm, site)
    assignments = [
        o for r in range(20) for o in algorithm.plan(state, context_of(site, r, SEED)).assignments if o.client == 5
    ]
    update = execute(algorithm, assignments[0], site)
    assert isinstance(update, ClientUpdate)
    assert update.spec.kept["classes"] == (0, 3)
    assert update.payload["classifier.weight"].shape[0] == update.payload["classifier.bias"].shape[0] == 2
    plan = algorithm.plan(state, context_of(site, assignments[0].round, SEED))
    merged = algorithm.merge(state, plan, [update], ServerSite(site)).params
    for row, held in enumerate([True, False, False, True]):
        assert torch.equal(merged["classifier.weight"][row], state.params["classifier.weight"][row]) != held


PART = SubmodelSpec.of({"conv": 2, "hidden": 16})
"""A quarter of the convolution's channels, half of the hidden ones."""


def leaves(spec: SubmodelSpec = FULL) -> Params:
    return {name: t.clone().requires_grad_(True) for name, t in take(START, FAMILY.layout(), spec).items()}


def logits(params: Params, conv_by: float = 1.0, hidden_by: float = 1.0) -> Tensor:
    """The outputs of TinyNet, with those of hidden layers divided."""
    conv = F.conv2d(samples()[0], params["conv.conv.weight"], params["conv.conv.bias"], padding=1) / conv_by
    flat = F.max_pool2d(F.relu(conv), 2).flatten(1)
    hidden = F.relu(F.linear(flat, params["fc.linear.weight"], params["fc.linear.bias"]) / hidden_by)
    more = F.linear(hidden, params["extra.linear.weight"], params["extra.linear.bias"]) / hidden_by
    return F.linear(hidden + F.relu(more), params["classifier.weight"], params["classifier.bias"])


def assert_gradient(found: Params, loss: Tensor, params: Params) -> None:
    assert_close(found, dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))


@pytest.mark.parametrize(
    ("spec", "scaler", "by"),
    [(FULL, 0.5, (0.5, 0.5)), (PART, "by_layer", (2 / 8, 16 / 32)), (FULL, "by_layer", (1.0, 1.0))],
)
def test_scaler_divides_outputs_of_hidden_layers(spec: SubmodelSpec, scaler: object, by: tuple[float, float]) -> None:
    params, start = leaves(spec), take(START, FAMILY.layout(), spec)
    found = moved(one_step(start=start, spec=spec, scaler=scaler), start)
    assert_gradient(found, F.cross_entropy(logits(params, *by), samples()[1]), params)


def test_absent_classes_have_logit_zero_in_student_and_teacher() -> None:
    """Labels 0, 1 and 3 occur. The logit of class 2 is 0: it takes part in the softmax, and learns nothing. FlexFL's
    loss, whose teacher is a part of the student."""
    params, present, tau = leaves(), torch.tensor([True, True, False, True]), 3.0
    student = torch.where(present, logits(params), 0.0)
    within = {name: tensor.detach() for name, tensor in take(params, FAMILY.layout(), PART).items()}
    teacher = torch.where(present, logits(within), 0.0)
    kl = F.kl_div((student / tau).log_softmax(1), (teacher / tau).softmax(1), reduction="none").mean() * tau**2
    found = moved(one_step(distillation=Distillation((PART,), 10.0, tau), mask_labels=True))
    assert_gradient(found, F.cross_entropy(student, samples()[1]) + 10.0 * kl, params)
    assert not found["classifier.weight"][2].any()


EXITS = TinyNet(exits=("conv", "fc"))
EXITS_START = initial_params(EXITS, 1)


def exit_loss(kd: float, teachers: str) -> ExitLoss:
    return ExitLoss((1 / 6, 2 / 6, 3 / 6), kd, 3.0, teachers)  # type: ignore[arg-type]


@pytest.mark.parametrize("teachers", ["last", "all"])
@pytest.mark.parametrize("kd", [0.0, 0.5])
def test_all_exits_are_trained(teachers: str, kd: float) -> None:
    def loss(out: Tensor | tuple[Tensor, ...], y: Tensor) -> Tensor:
        assert isinstance(out, tuple)
        rows = [F.cross_entropy(each, y, reduction="none") for each in out]
        total = rows[0] / 6 + rows[1] * 2 / 6 + rows[2] * 3 / 6
        distil = distil_from_last if teachers == "last" else distil_mutually
        return torch.as_tensor(total + kd * distil(FOUR, out, 3.0)).mean()

    found = moved(one_step(EXITS, EXITS_START, exits=exit_loss(kd, teachers)), EXITS_START)
    assert_close(found, gradient_of(loss, EXITS, EXITS_START))


def test_exit_losses_by_hand() -> None:
    """Two classes; logits (0, 0), (0, ln 3), (0, ln 9): shares 1/2, 1/4 : 3/4, 1/10 : 9/10. One sample of class 1."""
    logits = [torch.tensor([[0.0, math.log(k)]]) for k in (1.0, 3.0, 9.0)]
    y = torch.tensor([1])
    weighted = of_exits(TWO, logits, y, (1.0, 2.0, 4.0)).mean()
    assert float(weighted) == pytest.approx(math.log(2) + 2 * math.log(4 / 3) + 4 * math.log(10 / 9))

    def kl(t: float, s: float) -> float:
        """KL(teacher || student) of two-class distributions by the share of class 0."""
        return t * math.log(t / s) + (1 - t) * math.log((1 - t) / (1 - s))

    last = distil_from_last(TWO, logits, 1.0).mean()  # mean over the two classes, too
    assert float(last) == pytest.approx((1 * kl(0.1, 0.5) + 2 * kl(0.1, 0.25)) / 6 / 2, rel=1e-5)
    pairs = [kl(t, s) for s in (0.5, 0.25, 0.1) for t in (0.5, 0.25, 0.1) if s != t]
    assert float(distil_mutually(TWO, logits, 1.0).mean()) == pytest.approx(sum(pairs) / 2, rel=1e-5)
    # At tau = 2 the logits are halved and the result is multiplied by four.
    halved = [0.5 * each for each in logits]
    soft, plain = float(distil_mutually(TWO, logits, 2.0).mean()), float(distil_mutually(TWO, halved, 1.0).mean())
    assert soft == pytest.approx(4 * plain, rel=1e-5)


def test_what_each_exit_learns_by_hand() -> None:
    """The gradients of class 1's logit, of two classes whose shares for it are 1/2, 3/4 and 9/10. That of
    KL(t || s) is s - t for the student; for the teacher t (1 - t) (logit(t) - logit(s)), which DepthFL leaves out (Eq.
    3) and ScaleFL's code does not."""

    def gradients(term: Callable[..., Tensor], temperature: float) -> list[float]:
        exits = [torch.tensor([[0.0, temperature * math.log(k)]], requires_grad=True) for k in (1.0, 3.0, 9.0)]
        found = torch.autograd.grad(term(TWO, exits, temperature).sum(), exits)
        return [float(each[0, 1]) for each in found]

    mutual = [(0.5 - 0.75 + 0.5 - 0.9) / 2, (0.75 - 0.5 + 0.75 - 0.9) / 2, (0.9 - 0.5 + 0.9 - 0.75) / 2]
    assert mutual == pytest.approx([-0.325, 0.05, 0.275])
    teaching = 0.9 * 0.1 * (1 * math.log(9) + 2 * (math.log(9) - math.log(3)))
    last = [each / 6 / 2 for each in (1 * (0.5 - 0.9), 2 * (0.75 - 0.9), teaching)]  # mean over the two classes, too
    for temperature in (1.0, 3.0):  # tau^2 times what logits divided by tau give: tau
        for term, by_hand in ((distil_mutually, mutual), (distil_from_last, last)):
            assert gradients(term, temperature) == pytest.approx([temperature * g for g in by_hand], rel=1e-5)


def test_exits_of_numbers_by_hand() -> None:
    """Exits say 1, 2 and 4, the target is 3. Errors are squared, at every temperature."""
    outputs, goal = [torch.tensor([[v]]) for v in (1.0, 2.0, 4.0)], Regression()
    assert of_exits(goal, outputs, torch.tensor([[3.0]]), (1.0, 2.0, 4.0)).tolist() == [1 * 4 + 2 * 1 + 4 * 1]
    for temperature in (1.0, 3.0, 10.0):
        last, mutual = (f(goal, outputs, temperature).item() for f in (distil_from_last, distil_mutually))
        assert last == pytest.approx((1 * 9 + 2 * 4) / 6), "from the last, with the weights 1/6 and 2/6"
        assert mutual == pytest.approx(2 * (1 + 9 + 4) / 2), "each pair twice, over n - 1"


HALF, QUARTER = SubmodelSpec.of({"conv": 4, "hidden": 16}), SubmodelSpec.of({"conv": 2, "hidden": 8})


def test_step_of_one_width_moves_only_its_slice() -> None:
    found = moved(one_step(widths=(HALF,)))
    inside = take(found, FAMILY.layout(), HALF)
    x, y = samples()
    params = leaves(HALF)
    loss = F.cross_entropy(torch.func.functional_call(FAMILY.module(HALF), params, (x,)), y)
    assert_gradient(inside, loss, params)
    for name, t in inside.items():
        t.zero_()
        assert not found[name].any(), f"{name}: something outside of the slice moved"


def test_multiply_adds_of_a_step() -> None:
    """conv 9*8*16, fc 32*32, extra 32*32, classifier 32*4; half width: 9*4*16, 16*16 twice, 16*4."""
    full, half = 9 * 8 * 16 + 32 * 32 * 2 + 32 * 4, 9 * 4 * 16 + 16 * 16 * 2 + 16 * 4
    task = LocalTask(FULL, SGD(0.1), 1, 4, True, 0)
    assert macs_per_sample(FAMILY, task) == 3 * full
    assert macs_per_sample(FAMILY, replace(task, widths=(HALF, FULL))) == 3 * (full + half) / 2
    teachers = Distillation((HALF,), 10.0, 3.0)
    assert macs_per_sample(FAMILY, replace(task, distillation=teachers)) == 3 * full + half
    anywhere = SubmodelSpec.of({"conv": [0, 3, 4, 7], "hidden": range(16, 32)})
    assert macs_per_sample(FAMILY, replace(task, spec=anywhere)) == 3 * half


WIDTHS = {width: prefix(FAMILY.layout(), width) for width in (0.25, 0.5, 0.75, 1.0)}


def sandwich_of(*widths: float, sandwich: Sandwich, seed: int = 11) -> Trained:
    return one_step(widths=tuple(WIDTHS[width] for width in widths), sandwich=sandwich, seed=seed)


def sandwich_by_hand(*widths: float, weight: float, tau: float) -> tuple[Params, float]:
    """(gradient, loss): the mean over the sub-models of cross entropy, plus for all but the last weight * tau^2 * KL
    from the last's softened outputs, through which no gradient flows."""
    params, (x, y) = leaves(), samples()
    outputs = []
    for spec in (WIDTHS[width] for width in widths):
        outputs.append(torch.func.functional_call(FAMILY.module(spec), take(params, FAMILY.layout(), spec), (x,)))
    soft = F.softmax(outputs[-1].detach() / tau, dim=1)
    loss = F.cross_entropy(outputs[-1], y)
    for out in outputs[:-1]:
        kl = (soft * (soft.log() - F.log_softmax(out / tau, dim=1))).sum(1).mean()
        loss = loss + F.cross_entropy(out, y) + weight * tau**2 * kl
    loss = loss / len(outputs)
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)), loss.item()


@pytest.mark.parametrize(("weight", "tau"), [(0.0, 1.0), (1.0, 1.0), (0.5, 3.0)])
def test_the_gradient_of_the_smallest_and_the_largest(weight: float, tau: float) -> None:
    found = sandwich_of(0.5, 1.0, sandwich=Sandwich(1, weight, tau))
    gradient, loss = sandwich_by_hand(0.5, 1.0, weight=weight, tau=tau)
    assert_close(moved(found), gradient)
    assert found.loss == pytest.approx(loss, rel=1e-5)


def test_the_others_are_drawn_uniformly_and_by_seed() -> None:
    name = "fc.linear.weight"
    likely = {width: sandwich_by_hand(0.25, width, 1.0, weight=1.0, tau=1.0)[0][name] for width in (0.5, 0.75)}
    counts = dict.fromkeys(likely, 0)
    for seed in range(60):
        gradient = moved(sandwich_of(0.25, 0.5, 0.75, 1.0, sandwich=Sandwich(1, 1.0, 1.0), seed=seed))[name]
        (drawn,) = [width for width, each in likely.items() if torch.allclose(gradient, each, rtol=1e-4, atol=1e-6)]
        counts[drawn] += 1
    assert all(18 <= count <= 42 for count in counts.values()), counts


def test_running_statistics_are_the_largest_sub_models() -> None:
    family = SmallCNN((1, 8, 8), 4, width=0.25, norm="static")
    x, start = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1)), initial_params(family, 0)
    alone = LocalTask(FULL, SGD(0.1), epochs=1, batch_size=8, drop_last=True, seed=11)
    both = replace(alone, widths=(prefix(family.layout(), 0.5), FULL), sandwich=Sandwich(0, 1.0, 1.0))
    found, plain = (train(family, FOUR, [TrainingJob(task, start, x, samples()[1])])[0] for task in (both, alone))
    assert any(not torch.equal(found.params[name], t) for name, t in plain.params.items() if not is_statistic(name))
    statistics = [name for name in start if is_statistic(name)]
    assert statistics
    assert_same_bits({n: found.params[n] for n in statistics}, {n: plain.params[n] for n in statistics})

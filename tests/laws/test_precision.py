"""Half precision: what is computed in it, what stays float32, and that bits stay a matter of the job alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_engine.core import system
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError, ModelError
from fl_engine.core.slicing import initial_params, made_up, runnable
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, Distillation, LocalTask, Params
from fl_engine.core.widths import prefix
from fl_engine.models import MODELS
from fl_engine.models.chains import SmallCNN
from fl_engine.tasks import Classification, Regression
from fl_engine.testing.tiny import assert_same_bits
from fl_engine.training import lanes, optimizers, strategy
from fl_engine.training import numerics as arithmetic
from fl_engine.training.local import TrainingJob, train
from fl_engine.training.numerics import Numerics, Precision, choose_precision, cpu_bf16, differing
from fl_engine.training.optimizers import GOOD, SCALE, LossScale
from flexfleet.config import load_config

FAMILY = SmallCNN((1, 8, 8), 4, width=0.5)
GOAL = Classification(FAMILY.outputs)
TASK = LocalTask(FULL, SGD(0.05, 0.5), epochs=6, batch_size=8, drop_last=True, seed=3)
HALVES: tuple[Precision, ...] = ("bf16", "amp", "fp16")
CPU = torch.device("cpu")


def jobs(task: LocalTask, count: int = 3) -> list[TrainingJob]:
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    y = torch.arange(24) % 4
    x = patterns[y] + 0.3 * torch.randn(24, 1, 8, 8, generator=generator)
    return [TrainingJob(replace(task, seed=i), initial_params(FAMILY, i), x, y) for i in range(count)]


EVERY = [Numerics(precision=p) for p in HALVES] + [Numerics("batched", 8, p) for p in HALVES if p != "fp16"]


@pytest.mark.parametrize("numerics", EVERY, ids=lambda n: f"{n.strategy}-{n.precision}")
def test_half_precision_learns_and_returns_float32(numerics: Numerics) -> None:
    plain, half = train(FAMILY, GOAL, jobs(TASK)), train(FAMILY, GOAL, jobs(TASK), numerics)
    for a, b in zip(plain, half, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=0.05)
        assert {t.dtype for t in b.params.values()} == {torch.float32}
        assert any(not torch.equal(a.params[name], b.params[name]) for name in a.params), "it made no difference"
        for name, start in initial_params(FAMILY, 0).items():
            assert b.params[name].shape == start.shape


@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_lane_has_the_same_bits_alone(precision: Precision) -> None:
    numerics = Numerics("batched", 8, precision)
    teachers = Distillation((prefix(FAMILY.layout(), 0.5),), 10.0, 3.0)
    for task in (TASK, replace(TASK, distillation=teachers)):
        together = train(FAMILY, GOAL, jobs(task, 5), numerics)
        for job, expected in zip(jobs(task, 5), together, strict=True):
            assert_same_bits(train(FAMILY, GOAL, [job], numerics)[0].params, expected.params)


# ----------------------------------------------------------------------------------------------------------- fp16
NETWORKS = ("wisdm_lstm", "aep_mlp", "casas_bilstm", "widar_resnet18")
"""An LSTM, dropout, an embedding and a bidirectional LSTM, transposed convolutions and group norm."""


def half_by_hand(family: ModelFamily, goal: Task, job: TrainingJob, lr: float) -> Params:
    """One step of `module.half()` with plain SGD."""
    module = runnable(family, FULL, {name: t.clone() for name, t in job.start.items()}).half().train()
    x = job.x.half() if job.x.is_floating_point() else job.x
    goal.loss(module(x).float(), job.y).mean().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weight in module.parameters():
            if weight.grad is not None:
                weight -= lr * weight.grad
    return {name: t.float() for name, t in module.state_dict().items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_fp16_equals_module_half(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.Dropout, "forward", lambda self, x: x)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    kind = MODELS[name]
    family = kind(kind.published_input, kind.published_outputs)  # type: ignore[attr-defined]
    goal = Regression() if family.outputs == 1 else Classification(family.outputs)
    generator = torch.Generator().manual_seed(1)
    x, y = made_up(family, 2, generator), goal.examples(2, generator)
    task = LocalTask(FULL, SGD(1.0), epochs=1, batch_size=2, drop_last=True, seed=0)
    job = TrainingJob(task, initial_params(family, 0), x, y)
    (found,) = train(family, goal, [job], Numerics(precision="fp16"))
    assert found.finite and math.isfinite(found.loss)
    for tensor in found.params.values():
        assert torch.equal(tensor, tensor.half().float()), "weights are numbers of float16"
    by_hand = half_by_hand(family, goal, job, 1.0)
    ours, theirs = (
        torch.cat([(p[name] - t.half().float()).flatten() for name, t in job.start.items()])
        for p in (found.params, by_hand)
    )
    assert theirs.norm() > 0 and (ours - theirs).norm() < 0.1 * theirs.norm()


def test_fp16_with_batched_is_refused() -> None:
    with pytest.raises(ValueError, match="fp16"):
        Numerics("batched", 2, "fp16")
    assert strategy.choose(FAMILY, GOAL, 8, 4, "fp16") == Numerics(precision="fp16")
    assert strategy.choose(FAMILY, GOAL, 8, 4, "amp").strategy == "batched"
    with pytest.raises(ConfigError):
        load_config(None, ["run.precision=fp16", "run.strategy=batched"])


def test_momentum_in_half_by_hand() -> None:
    """100 weights, two steps of w -= lr * b, b = 0.5 * b + g, each number rounded to float16."""
    weights = {"w": torch.linspace(-2, 2, 100).half()[None].requires_grad_()}
    step = optimizers.stepper(SGD(0.25, 0.5), weights, {})
    expected, buffer = weights["w"].detach().clone(), torch.zeros(1, 100).half()
    for gradient in (torch.linspace(1, 3, 100).half()[None], torch.linspace(-3, 1, 100).half()[None]):
        weights["w"].grad = gradient.clone()
        step(0.25)
        buffer = buffer * 0.5 + gradient
        expected = expected - 0.25 * buffer
    torch.testing.assert_close(weights["w"].detach(), expected, rtol=0, atol=2e-3)


def test_fp16_leaves_out_weight_decay() -> None:
    decayed = replace(TASK, optimizer=SGD(0.05, 0.5, 0.1))
    for precision, same in (("fp16", True), ("fp32", False)):
        numerics = Numerics(precision=precision)  # type: ignore[arg-type]
        a, b = (train(FAMILY, GOAL, jobs(task, 1), numerics)[0].params for task in (TASK, decayed))
        assert all(torch.equal(a[name], b[name]) for name in a) is same


def test_overflow_of_half_is_divergence() -> None:
    """65,504 is the largest number of float16."""
    half = Numerics(precision="fp16")
    (job,) = jobs(replace(TASK, optimizer=SGD(6e4)), 1)
    (found,) = train(FAMILY, GOAL, [job], half)
    assert not found.finite or not math.isfinite(found.loss)
    (job,) = jobs(replace(TASK, optimizer=SGD(7e4)), 1)
    with pytest.raises(ModelError):
        train(FAMILY, GOAL, [job], half)


# ---------------------------------------------------------------------------------------------- the scaled loss
def test_loss_scale_follows_torchs_scaler() -> None:
    theirs_w = torch.tensor([[1.0, -2.0]], requires_grad=True)
    ours_w = theirs_w.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs_w], lr=0.1, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000)
    moments: Params = {}
    weights = {"w": ours_w}
    scale = LossScale(optimizers.stepper(SGD(0.1, 0.9, 0.01), weights, moments), weights, moments, None)
    for step in range(2010):
        factor = torch.tensor(float("inf") if step in (0, 3, 2007) else 1.0)
        for w in (theirs_w, ours_w):
            w.grad = None
        scaler.scale((theirs_w.square() * factor).sum() * 1e-3).backward()
        scaler.step(optimizer)
        scaler.update()
        scale.scaled((ours_w.square() * factor).sum(1) * 1e-3).sum().backward()  # type: ignore[no-untyped-call]
        scale.unscale()
        scale.step(0.1)
        assert torch.allclose(theirs_w, ours_w, rtol=1e-5), step
        assert moments[SCALE].item() == scaler.get_scale(), step
    # Halved at steps 0, 3 and 2007, doubled after 2000 good ones, at 2003.
    assert moments[SCALE].item() == 2.0**14 and moments[GOOD].item() == 2009 - 2007


# ----------------------------------------------------------------------------------------------------------- auto
X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu sse2 avx512f {}\nbugs\t\t: spectre_v1\n\n"
ARM = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm {}
CPU implementer\t: {}
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {}
CPU revision\t: 3

"""
PI_4 = ARM.format("crc32 cpuid", "0x41", "0xd08")
PI_5 = ARM.format("aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp", "0x41", "0xd0b")
GRAVITON_3 = ARM.format("crc32 atomics fphp asimdhp cpuid asimddp sve i8mm bf16 svebf16 dgh rng", "0x41", "0xd40")


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Give this process another processor, by the text of its /proc/cpuinfo."""

    def forget() -> None:
        system.features.cache_clear()
        system.parts.cache_clear()

    def be(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(system, "CPUINFO", tmp_path / "cpuinfo")
        forget()

    yield be
    forget()


@pytest.mark.parametrize(
    ("cpuinfo", "found", "auto"),
    [
        (X86.format("avx512_bf16 amx_tile amx_bf16"), ("amx_bf16", "avx512_bf16"), "bf16"),
        (X86.format("avx512_vnni amx_tile amx_int8"), (), "fp32"),
        (PI_5, (), "fp32"),
        (GRAVITON_3, ("bf16", "svebf16"), "bf16"),
        ("", (), "fp32"),
    ],
)
def test_auto_precision_follows_the_processor(
    cpuinfo: str, found: tuple[str, ...], auto: Precision, on: Callable[[str], None]
) -> None:
    on(cpuinfo * 2)
    assert cpu_bf16() == found
    assert choose_precision("auto", ("cpu", "cpu"), None) == auto


@pytest.mark.parametrize(
    ("one", "other", "precision", "entry"),
    [
        (X86.format("avx512_bf16"), X86.format(""), "bf16", "cpu_bf16"),
        (X86.format("avx512_fp16"), X86.format(""), "fp16", "cpu_fp16"),
        (GRAVITON_3, GRAVITON_3.replace("bf16", ""), "amp", "cpu_bf16"),
        (PI_4, PI_5, "fp32", "cpu_parts"),
        (PI_4, PI_5 + PI_4, "fp32", "cpu_parts"),
    ],
)
def test_processors_with_other_bits_have_other_numerics(
    one: str, other: str, precision: Precision, entry: str, on: Callable[[str], None]
) -> None:
    on(one)
    before = arithmetic.describe(Numerics(precision=precision), ("cpu",))
    on(other)
    now = arithmetic.describe(Numerics(precision=precision), ("cpu",))
    assert differing(before, now).startswith(f"{entry}: ") and differing(now, now) == ""
    at_gpu = {"devices": ["cuda", "a GPU"]}
    assert differing(before | at_gpu, now | at_gpu) == "", "the processor does not train there"


def test_resumed_run_keeps_its_precision(on: Callable[[str], None]) -> None:
    for feature in ("", "avx512_bf16"):
        on(X86.format(feature))
        for before in ("fp32", "bf16", "amp"):
            assert choose_precision("auto", ("cpu",), {"precision": before}) == before
        assert choose_precision("fp16", ("cpu",), {"precision": "bf16"}) == "fp16", "it is named"

"""What `from_module` refuses, with the module, the line, the reason and ways out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.pool import layer_sizes
from fl_engine.core.types import HEAD
from fl_engine.core.widths import from_layer, prefix
from fl_engine.models.traced import from_module
from fl_engine.training.lanes import can_run


class Between(nn.Module):
    """(B, 6) -> (B, 3): what `middle` makes of 8 channels stands between two layers."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.last = nn.Linear(8, 3)
        self.register_buffer("two", torch.tensor(2))
        self.middle = [middle]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle[0](self, torch.tanh(self.first(x))))


def refused(build: Any, shape: tuple[int, ...] = (6,), outputs: int = 3, **options: Any) -> str:
    with pytest.raises(ModelError) as told:
        from_module(build)(shape, outputs, **options)
    return str(told.value)


Middle = Callable[[Any, Tensor], Tensor]

MIXING: dict[str, tuple[Middle, dict[str, nn.Module]]] = {
    "layer norm": (lambda m, x: m.norm(x), {"norm": nn.LayerNorm(8)}),
    "group norm of one group": (lambda m, x: m.norm(x), {"norm": nn.GroupNorm(1, 8)}),
    "softmax": (lambda m, x: F.softmax(x, dim=-1), {}),
    "softmax layer": (lambda m, x: m.soft(x), {"soft": nn.Softmax(1)}),
    "mean": (lambda m, x: x - x.mean(1, keepdim=True), {}),
    "split": (lambda m, x: torch.cat(x.chunk(2, dim=1)[::-1], 1), {}),
    "slice": (lambda m, x: torch.cat([x[:, 4:], x[:, :4]], 1), {}),
    "shuffle": (lambda m, x: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8), {}),
    "product": (lambda m, x: (x[:, :, None] @ x[:, None, :]).sum(2), {}),
    "unknown layer": (lambda m, x: m.odd(x, x), {"odd": nn.Bilinear(8, 8, 8)}),
    "batch norm over": (lambda m, x: m.norm(x[:, None]).flatten(1), {"norm": nn.BatchNorm1d(1)}),
    "convolution over": (lambda m, x: m.conv(x[:, None]).sum(1), {"conv": nn.Conv1d(1, 4, 1)}),
    "no rule, added": (lambda m, x: x + x.flip(1), {}),
    "attention, added": (
        lambda m, x: x + m.att(x[:, None], x[:, None], x[:, None], need_weights=False)[0].mean(1),
        {"att": nn.MultiheadAttention(8, 2, batch_first=True)},
    ),
    "function": (lambda m, x: F.linear(x, torch.eye(8)), {}),
    "index by a tensor": (lambda m, x: x + x[:, m.two][:, None], {}),
    "axis that is a tensor": (lambda m, x: x[..., None].expand(-1, -1, 4).softmax(m.two).sum(2), {}),
}


@pytest.mark.parametrize("name", MIXING)
def test_operation_that_mixes_channels_is_refused(name: str) -> None:
    """The error has the line and both ways out, which work."""
    middle, layers = MIXING[name]

    def build() -> nn.Module:
        return Between(middle, **layers)

    said = refused(build)
    assert re.search(r"\(test_traced_refusals\.py:\d+, ", said), said
    assert "fedavg" in said
    pinned = re.search(r"pin=\['(\w+)'\]", said)
    assert pinned is not None, said
    assert set(from_module(build)((6,), 3, pin=(pinned[1],)).layout().groups) <= {"first", HEAD}
    assert from_module(build)((6,), 3, whole=True).layout().groups == {HEAD: 3}


ALLOWED: dict[str, tuple[Any, dict[str, nn.Module]]] = {
    "gate": (lambda m, x: x * torch.sigmoid(m.gate(x)), {"gate": nn.Linear(8, 8)}),
    "constant": (lambda m, x: 2 * x / 3 - 1, {}),
    "prelu": (lambda m, x: m.act(x), {"act": nn.PReLU(8)}),
    "twice": (lambda m, x: m.again(torch.relu(m.again(x))), {"again": nn.Linear(8, 8)}),
    "written size": (lambda m, x: x.reshape(len(x), 8, 1).expand(-1, 8, 2).mean(2), {}),
    "stack": (lambda m, x: torch.stack([x, -x], 1).amax(1), {}),
    "where": (lambda m, x: torch.where(x > 0, x, 0.1 * x), {}),
    "normed by group": (lambda m, x: m.norm(x), {"norm": nn.GroupNorm(4, 8)}),
    "slice of steps": (lambda m, x: F.pad(x[:, :, None], (0, 2))[..., : x[..., None].size(-1)].squeeze(2), {}),
    "clamp": (lambda m, x: x / x.abs().clamp_min(0.1).clamp_max(3.0), {}),
    "squeeze": (lambda m, x: torch.squeeze(x.squeeze()[:, None, :, None]).view(-1, 8), {}),
    "unflatten": (lambda m, x: x.unflatten(1, (8, 1)).flatten(1), {}),
    "unflatten layer": (lambda m, x: m.un(x).flatten(1), {"un": nn.Unflatten(1, (1, 8))}),
    "slice of steps up to a tensor": (lambda m, x: x[..., None].expand(-1, -1, 4)[:, :, m.two - 1 : m.two].sum(2), {}),
    "by keyword": (lambda m, x: m.again(input=m.act(input=x)), {"act": nn.ReLU(), "again": nn.Linear(8, 8)}),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_leaves_channels_apart_is_cut(name: str) -> None:
    middle, layers = ALLOWED[name]
    groups = from_module(lambda: Between(middle, **layers))((6,), 3).layout().groups
    assert groups["first"] == (4 if name == "normed by group" else 8)


def test_channels_that_a_frozen_layer_keeps_whole_may_be_mixed() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    family = from_module(lambda: Between(lambda m, x: F.softmax(x, 1).cumsum(1) + m.frozen(x), frozen=frozen))((6,), 3)
    assert family.layout().groups == {HEAD: 3}


class Odd(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.body = [forward]

    def forward(self, x: Tensor) -> Any:
        return self.body[0](self, x)


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    return {"a": nn.Linear(6, 8), "b": nn.Linear(8, 3), **more}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.b(-m.a(x)),
        lambda m, x: m.b(torch.relu(m.a(x)) if m.training else m.a(x)),
    ],
    ids=["by values", "by mode"],
)
def test_control_flow_is_refused_with_its_line(forward: Middle) -> None:
    said = refused(lambda: Odd(forward, **layers()))
    assert "test_traced_refusals.py" in said and "fedavg" in said


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(lambda: float(torch.rand(())), "torch"), (np.random.rand, "numpy"), (random.random, "random")],
)
def test_control_flow_on_random_numbers(draw: Callable[[], float], whose: str) -> None:
    """Layers that are left out by chance (stochastic depth): a trace would leave them out always, or never."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) if not m.training or draw() < 1 else m.b(-m.a(x))  # where it is traced always the first

    assert whose in refused(lambda: Odd(forward, **layers()))


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def tied() -> nn.Module:
    module = Odd(lambda m, x: m.b(m.c(m.a(x))), **layers(c=nn.Linear(8, 8), d=nn.Linear(8, 8)))
    module.d.weight = module.c.weight
    return module


def weight_normed() -> nn.Module:
    return Odd(lambda m, x: m.b(m.a(x)), **layers(a=nn.utils.weight_norm(nn.Linear(6, 8))))


def doubled() -> nn.Module:
    return Odd(lambda m, x: m.b(m.a(x).double()).float(), **layers(b=nn.Linear(8, 3).double()))


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3]


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3).requires_grad_(False), nn.BatchNorm1d(3, affine=False))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    ("build", "token"),
    [
        (TwoInputs, "x, y"),
        (lambda: Odd(lambda m, x: (m.b(m.a(x)),) * 2, **layers()), "got tuple"),
        (tied, "c.weight and d.weight"),
        (weight_normed, "a.weight"),
        (doubled, "b.weight is float64"),
        (lambda: Odd(lambda m, x: m.b(m.a(x)), **layers(c=nn.Linear(8, 8))), "c.weight, c.bias"),
        (Bare, "no weights"),
        (frozen, "no weights"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)), "momentum=None"),
    ],
)
def test_network_that_cannot_be_trained_is_refused_by_all(build: Any, token: str) -> None:
    assert token in refused(build)
    assert token in refused(build, whole=True)


def test_dropout_without_the_flag() -> None:
    assert "training=self.training" in refused(lambda: Odd(lambda m, x: m.b(F.dropout(m.a(x))), **layers()))


def test_grouped_convolutions() -> None:
    def build() -> nn.Module:
        parts = {"a": nn.Conv1d(2, 8, 1), "g": nn.Conv1d(8, 8, 3, groups=2), "b": nn.Linear(8, 3)}
        return Odd(lambda m, x: m.b(torch.relu(m.g(m.a(x))).mean(2)), **parts)

    assert "pin=['g']" in refused(build, (2, 7))
    assert from_module(build)((2, 7), 3, pin=("g",)).layout().groups == {HEAD: 3}


def test_buffers_that_training_changes() -> None:
    class Counting(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.fc = name, nn.Linear(6, 3)
            self.register_buffer(name, torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            centre = getattr(self, self.name)
            if self.training:
                centre.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.fc(x - centre)

    assert "centre" in refused(lambda: Counting("centre"), whole=True)
    slots = from_module(lambda: Counting("centre_running_mean"), whole=True)((6,), 3).layout().slots
    assert list(slots) == ["centre_running_mean", "fc.weight", "fc.bias"]


def test_dependence_on_the_number_of_channels_is_found() -> None:
    assert "zeroed" in refused(lambda: Between(lambda m, x: x / x.size(1)))
    assert "RuntimeError" in refused(lambda: Between(lambda m, x: x.reshape(shape=(len(x), 8))))


def test_code_that_fails_and_options_that_do_not_fit() -> None:
    assert re.search(
        r"test_traced_refusals.py:\d+, .*RuntimeError", refused(lambda: Between(lambda m, x: x.view(-1, 7)))
    )
    assert "'frist'" in refused(lambda: Between(lambda m, x: x), pin=("frist",))
    assert "pin" in refused(lambda: Between(lambda m, x: x), whole=True, pin=("first",))
    with pytest.raises(ModelError, match="got 3"):
        from_module(3)  # type: ignore[arg-type]


def test_algorithms_that_cut_refuse_a_whole_network() -> None:
    family = from_module(lambda: Between(lambda m, x: x), whole=True)((6,), 3)
    for cut in (lambda: layer_sizes(family), lambda: prefix(family.layout(), 0.5), lambda: from_layer(family, 0.5, 0)):
        with pytest.raises(PoolError):
            cut()
    assert not can_run(family.module()), "clients train one at a time"

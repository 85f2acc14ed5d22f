"""What `from_module` keeps whole, and what it refuses with the line, the reason and the cure."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.pool import layer_sizes
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL, HEAD
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
        self.middle = [middle]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle[0](self, torch.tanh(self.first(x))))


def refused(build: Any, shape: tuple[int, ...] = (6,), code: str = "model.uncut", **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        from_module(build)(shape, 3, **options)
    assert error.value.code == code
    return str(error.value)


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
    "squeeze without an axis": (lambda m, x: torch.squeeze(x.squeeze()[:, None, :, None]), {}),
}


@pytest.mark.parametrize("name", MIXING)
def test_operation_that_mixes_channels_keeps_them_all(name: str) -> None:
    middle, layers = MIXING[name]

    def build() -> nn.Module:
        return Between(middle, **copy.deepcopy(layers))

    said = refused(build)  # nothing else could be cut
    assert re.search(r"\(test_traced_refusals\.py:\d+\)", said) and "fedavg" in said
    assert from_module(build)((6,), 3, whole=True).layout().groups == {HEAD: 3}
    longer = from_module(lambda: nn.Sequential(build(), nn.ReLU(), nn.Linear(3, 3)))((6,), 3)
    assert longer.layout().groups == {"0.last": 3, HEAD: 3}


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


TWICE = nn.Linear(8, 8)
ALLOWED: dict[str, tuple[Any, dict[str, nn.Module]]] = {
    "gate": (lambda m, x: x * torch.sigmoid(m.gate(x)), {"gate": nn.Linear(8, 8)}),
    "constant": (lambda m, x: 2 * x / 3 - 1, {}),
    "prelu": (lambda m, x: m.act(x), {"act": nn.PReLU(8)}),
    "twice": (lambda m, x: m.again(torch.relu(m.again(x))), {"again": nn.Linear(8, 8)}),
    "written size": (lambda m, x: x.reshape(x.size(0), 8, 1).expand(-1, 8, 2).mean(2), {}),
    "stack": (lambda m, x: torch.stack([x, -x], 1).amax(1), {}),
    "where": (lambda m, x: torch.where(x > 0, x, 0.1 * x), {}),
    "normed by group": (lambda m, x: m.norm(x), {"norm": nn.GroupNorm(4, 8)}),
    "slice of steps": (lambda m, x: F.pad(x[:, :, None], (0, 2))[..., : x[..., None].size(-1)].squeeze(2), {}),
    "clamp": (lambda m, x: x / x.abs().clamp_min(0.1).clamp_max(3.0), {}),
    "squeeze": (lambda m, x: torch.squeeze(x[:, None, :, None], 3).squeeze(1).view(-1, 8), {}),
    "two names": (lambda m, x: m.one(torch.relu(m.other(x))), {"one": TWICE, "other": TWICE}),
    "stochastic depth": (lambda m, x: x + m.drop(x), {"drop": DropPath()}),
    "shape test": (lambda m, x: x if torch.tanh(x).dim() == 2 and len(x.shape) == 2 else x[0], {}),
    "zero state": (
        lambda m, x: m.rnn(x[:, None], torch.zeros(1, x.size(0), 8).to(x.device))[0][:, 0],
        {"rnn": nn.GRU(8, 8, batch_first=True)},
    ),
    "length": (
        lambda m, x: m.rnn(x[:, None], torch.zeros(1, len(x), 8))[0].reshape(len(x), 8) if len(x) > 0 else x,
        {"rnn": nn.GRU(8, 8, batch_first=True)},
    ),
    "by keyword": (lambda m, x: m.again(input=m.act(input=x)), {"act": nn.ReLU(), "again": nn.Linear(8, 8)}),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_operation_that_keeps_channels_apart_is_cut(name: str) -> None:
    middle, layers = ALLOWED[name]
    groups = from_module(lambda: Between(middle, **layers))((6,), 3).layout().groups
    assert groups["first"] == (4 if name == "normed by group" else 8)


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        (nn.Linear(8, 8).requires_grad_(False), "frozen weight layer.weight"),
        (nn.Buffer(torch.ones(8)), "buffer layer"),
        (nn.Parameter(torch.ones(8), requires_grad=False), "frozen weight layer"),
    ],
)
def test_pool_error_names_what_keeps_the_channels(layer: Any, kept: str) -> None:
    class Kept(Between):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.layer(x) if isinstance(layer, nn.Module) else x * m.layer)
            self.layer = layer

    family = from_module(Kept)((6,), 3)
    assert family.layout().groups == {HEAD: 3}
    with pytest.raises(PoolError) as error:
        layer_sizes(family)
    assert kept in str(error.value)


def test_weight_that_shares_kept_channels_is_not_a_cause() -> None:
    def build() -> nn.Module:
        module = Between(lambda m, x: m.norm(x) * m.scale, norm=nn.LayerNorm(8))
        module.scale = nn.Parameter(torch.ones(8))
        return module

    said = refused(build)
    assert "norm" in said and "scale" not in said


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3)), "output layer 0"),
        (
            lambda: nn.Sequential(register_parametrization(nn.Linear(6, 8), "weight", nn.Tanh()), nn.Linear(8, 3)),
            "0 (Par",
        ),
    ],
)
def test_pool_error_names_layer_without_free_channels(build: Any, kept: str) -> None:
    with pytest.raises(PoolError) as error:
        layer_sizes(from_module(build)((6,), 3))
    assert kept in str(error.value)


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
        lambda m, x: m.b(m.a(x)) if len(x.shape) == 2 and x.size(0) > 1 else m.b(-m.a(x)),
    ],
    ids=["by values", "by mode", "by batch size"],
)
def test_control_flow_is_refused_with_its_line(forward: Middle) -> None:
    said = refused(lambda: Odd(forward, **layers()))
    assert "test_traced_refusals.py" in said and "fedavg" in said


def test_forward_that_iterates_parameters_is_refused_with_its_line() -> None:
    said = refused(lambda: Odd(lambda m, x: m.b(m.a(x)) + sum(p.sum() for p in m.parameters()), **layers()))
    assert "forward (test_traced_refusals.py" in said


def tied() -> nn.Module:
    module = Odd(lambda m, x: m.b(m.d(m.c(m.a(x)))), **layers(c=nn.Linear(8, 8), d=nn.Linear(8, 8)))
    module.d.weight = module.c.weight
    return module


def registered_twice() -> nn.Module:
    twice = nn.Linear(8, 8)
    return Odd(lambda m, x: m.b(m.d(torch.tanh(m.c(m.a(x))))), **layers(c=twice, d=twice))


@pytest.mark.parametrize("build", [tied, registered_twice])
def test_shared_weights_are_trained_and_sent_once(build: Callable[[], nn.Module]) -> None:
    family, user, x = from_module(build, whole=True)((6,), 3), build(), torch.randn(4, 6)
    params = initial_params(family, 0)
    assert "d.weight" not in params
    user.load_state_dict(
        params | {name: params[name.replace("d.", "c.")] for name in user.state_dict().keys() - params.keys()}
    )
    network = runnable(family, FULL, params)
    for each in (user, network):
        each(x).square().sum().backward()
    torch.testing.assert_close(network(x), user(x))
    torch.testing.assert_close(network.c.weight.grad, user.c.weight.grad)  # type: ignore[union-attr]


def test_tied_parameters_cannot_be_cut() -> None:
    assert "c.weight and d.weight" in refused(tied)


@pytest.mark.parametrize(
    "look", [lambda m, x: m.bag(x), lambda m, x: F.one_hot(x, 9).float().mean(1), lambda m, x: torch.eye(9)[x].mean(1)]
)
def test_token_network_without_an_embedding_takes_tokens(look: Middle) -> None:
    parts = {"bag": nn.EmbeddingBag(9, 9)} if "bag" in look.__code__.co_names else {}
    family: Any = from_module(lambda: Odd(lambda m, x: m.head(look(m, x)), **parts, head=nn.Linear(9, 3)))((5,), 3)
    assert family.vocabulary == 9


def doubled() -> nn.Module:
    return Odd(lambda m, x: m.b(m.a(x).double()).float(), **layers(b=nn.Linear(8, 3).double()))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3).requires_grad_(False), nn.BatchNorm1d(3, affine=False))


@pytest.mark.parametrize(
    ("build", "token"),
    [
        (lambda: Odd(lambda m, x: (m.b(m.a(x)),) * 2, **layers()), "got tuple"),
        (doubled, "b.weight is float64"),
        (lambda: Odd(lambda m, x: m.b(m.a(x)), **layers(c=nn.Linear(8, 8))), "c.weight, c.bias"),
        (frozen, "no weights"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)), "momentum=None"),
        (lambda: Odd(lambda m, x: m.b(x), **layers()), "RuntimeError"),
        (lambda size: nn.Linear(6, size), "size"),
    ],
)
def test_network_that_cannot_be_trained_is_refused_by_all(build: Any, token: str) -> None:
    assert token in refused(build, code="model.untrainable")
    assert token in refused(build, code="model.untrainable", whole=True)


def test_dropout_without_the_flag() -> None:
    refused(lambda: Odd(lambda m, x: m.b(F.dropout(m.a(x))), **layers()), code="model.untrainable")


def test_grouped_convolutions() -> None:
    def build() -> nn.Module:
        parts = {"a": nn.Conv1d(2, 8, 1), "g": nn.Conv1d(8, 8, 3, groups=2), "b": nn.Linear(8, 3)}
        return Odd(lambda m, x: m.b(torch.relu(m.g(m.a(x))).mean(2)), **parts)

    refused(build, (2, 7))


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

    class Unused(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.centre += 1
            return self.fc(x)

    for kind in (Counting, Unused):
        for whole in (True, False):
            assert "centre" in refused(lambda kind=kind: kind("centre"), code="model.untrainable", whole=whole)
    slots = from_module(lambda: Counting("centre_running_mean"), whole=True)((6,), 3).layout().slots
    assert list(slots) == ["centre_running_mean", "fc.weight", "fc.bias"]


def test_dependence_on_the_number_of_channels_is_found() -> None:
    assert "depends on the number of channels" in refused(lambda: Between(lambda m, x: x / x.size(1)))
    assert "RuntimeError" in refused(lambda: Between(lambda m, x: x.reshape(shape=(x.size(0), 8))))


def test_error_names_the_line_of_the_users_code() -> None:
    said = refused(lambda: Between(lambda m, x: x.view(-1, 7)), code="model.untrainable")
    assert re.search(r"test_traced_refusals.py:\d+\): RuntimeError", said)
    with pytest.raises(ModelError):
        from_module(3)  # type: ignore[arg-type]


def test_algorithms_that_cut_refuse_a_whole_network() -> None:
    family = from_module(lambda: Between(lambda m, x: x), whole=True)((6,), 3)
    for cut in (lambda: layer_sizes(family), lambda: prefix(family.layout(), 0.5), lambda: from_layer(family, 0.5, 0)):
        with pytest.raises(PoolError):
            cut()
    with pytest.raises(PoolError) as error:
        layer_sizes(family)
    assert "model.whole" in str(error.value)
    assert not can_run(family.module()), "clients train one at a time"

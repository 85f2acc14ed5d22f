"""`from_module`: users' networks against the laws of all networks, against ours, and in runs."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_engine.core.allowed import trust
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL, HEAD, Axis
from fl_engine.models.build import build_model, model_kind
from fl_engine.models.traced import from_module
from fl_engine.testing.models import ModelSuite
from flexfleet.config import Config
from flexfleet.pipeline import warm_start
from tests.harness.networks import SMALL
from tests.models import own_networks as nets

FAMILIES = {
    "resnet18": lambda: from_module(lambda num_classes: nets.ResNet18(num_classes, 4))((3, 33, 33), 5),
    "unet": lambda: from_module(nets.UNetClassifier)((1, 8, 8), 4),
    "conv1d": lambda: from_module(nets.Conv1dNet)((12, 3), 4),
    "lstm": lambda: from_module(nets.LSTMClassifier)((7,), 4),
    "gpt": lambda: from_module(nets.GPT)((5,), 4),
}


@cache
def made(name: str) -> ModelFamily:
    return FAMILIES[name]()


class TestTracedNetworks(ModelSuite):
    @pytest.fixture(params=sorted(FAMILIES))
    def family(self, request: pytest.FixtureRequest) -> ModelFamily:
        return made(request.param)


# ------------------------------------------------------------------------------------- as we write it by hand
NETWORKS: dict[str, Any] = dict(SMALL)
BY_HAND = {name: NETWORKS[name] for name in ("small_cnn", "wisdm_lstm", "casas_bilstm", "text_lstm")}
BY_HAND |= {name: dataclasses.replace(NETWORKS[name], norm="batch") for name in ("har_cnn", "mobilenetv3_ofa")}
COARSER = {name: NETWORKS[name] for name in ("resnet18", "preresnet18")}
"""Ours tie more than they have to: a stage is one group, the channels inside its blocks too."""


@cache
def traced(family: Any) -> ModelFamily:
    return from_module(lambda: family.module())(family.input_shape, family.outputs)


@pytest.mark.parametrize("name", [*BY_HAND, *COARSER])
def test_the_layout_is_the_one_written_by_hand(name: str) -> None:
    ours = (BY_HAND | COARSER)[name]
    wanted, found = ours.layout(), traced(ours).layout()
    assert list(found.slots) == list(wanted.slots)
    same: dict[str | None, str | None] = {}
    for parameter, slot in wanted.slots.items():
        for by_hand, axis in zip(slot.axes, found.slots[parameter].axes, strict=True):
            assert (axis.repeat, axis.copies, axis.then) == (by_hand.repeat, by_hand.copies, None), parameter
            assert same.setdefault(axis.group, by_hand.group) == by_hand.group, parameter
    assert same[HEAD] == HEAD
    assert set(same) - {None} == set(found.groups)
    if name in BY_HAND:
        assert len(found.groups) == len(wanted.groups)
        assert [same[p.group] for p in traced(ours).prunable()] == [p.group for p in ours.prunable()]


def test_channels_that_attention_mixes_are_kept() -> None:
    assert made("gpt").layout().groups == {"block.mlp.0": 32, HEAD: 4}


def test_concatenation_and_group_norm_share_channels_as_expected() -> None:
    layout = made("unet").layout()
    assert layout.groups == {"down1.0": 4, "down2.0": 16, "up": 12, "join.0": 8, HEAD: 4}
    assert layout.slots["down1.0.weight"].axes[0] == Axis("down1.0", repeat=2), "two channels a norm group"
    assert layout.slots["join.0.weight"].axes[1] == Axis("down1.0", repeat=2, then=Axis("up"))
    assert layout.slots["norm.running_mean"].axes == (Axis("join.0", then=Axis("down1.0", repeat=2)),)


# ------------------------------------------------------------------------------------------ what build may be
class Tiny(nn.Module):
    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.first(x))))


def test_class_draws_weights_by_seed_and_module_keeps_its_own() -> None:
    family, module = from_module(Tiny)((4,), 3), Tiny()
    assert torch.equal(initial_params(family, 1)["first.weight"], initial_params(family, 1)["first.weight"])
    assert not torch.equal(initial_params(family, 1)["first.weight"], initial_params(family, 2)["first.weight"])
    own: Any = from_module(module)((4,), 3)
    assert torch.equal(initial_params(own, 1)["first.weight"], module.first.weight)
    assert list(own.weights()) == list(own.layout().slots)
    start = warm_start.start(Config(), own)
    assert start is not None and torch.equal(start["head.bias"], module.head.bias), "the run's first weights"
    assert warm_start.start(Config(), family) is None, "fresh ones"
    assert not any("num_batches" in name for name in own.layout().slots), "integers are not averaged"


def test_the_same_thing_gives_the_same_class_under_its_own_name() -> None:
    kind = from_module(Tiny)
    assert kind is from_module(Tiny) and kind is not from_module(Tiny, whole=True)
    assert (kind.__module__, kind.__qualname__) == (Tiny.__module__, "Tiny")
    assert [f.name for f in dataclasses.fields(kind)] == ["input_shape", "outputs", "whole"]  # type: ignore[arg-type]
    assert kind((4,), 3) == kind((4,), 3) and hash(kind((4,), 3)) == hash(kind((4,), 3))


def test_a_family_travels_to_another_process() -> None:
    family = from_module(nets.UNetClassifier)((1, 8, 8), 4)
    assert pickle.loads(pickle.dumps(family)) == family  # noqa: S301 - our own bytes


# ----------------------------------------------------------------------------------- frozen, buffers, dropout
class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.frozen = nn.Linear(4, 6)
        self.frozen.requires_grad_(False)
        self.open = nn.Linear(6, 5)
        self.drop = nn.Dropout2d(0.5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.frozen(x * self.scale))
        return self.head(self.drop(torch.relu(self.open(out))[:, :, None, None]).flatten(1))


def test_frozen_parameters_are_neither_trained_nor_sent() -> None:
    module = Partly()
    for whole in (False, True):
        family = from_module(module, whole=whole)((4,), 3)
        assert list(family.layout().slots) == ["open.weight", "open.bias", "head.weight", "head.bias"]
        network = runnable(family, FULL, initial_params(family, 0))
        assert torch.equal(network.get_buffer("frozen.weight"), module.frozen.weight)
        assert [name for name, _ in network.named_parameters()] == list(family.layout().slots)
    layout = from_module(module)((4,), 3).layout()
    assert layout.groups == {"open": 5, HEAD: 3}, "a frozen layer keeps all its channels"


def test_random_layers_draw_from_the_clients_generator() -> None:
    """The engine seeds an nn.Dropout that draws the seed; torch's own generator does not change."""
    for whole in (False, True):
        network: Any = runnable(family := from_module(Partly, whole=whole)((4,), 3), FULL, initial_params(family, 0))
        x, before = torch.randn(8, 4), torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            outs = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                outs.append(network.train()(x))
        assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
        assert network.draws and torch.equal(network.eval()(x), network(x))
        assert torch.equal(before, torch.get_rng_state())


def test_whole_trains_what_cannot_be_traced_or_counted_by_layer() -> None:
    class ByValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)
            self.mix = nn.Parameter(torch.ones(2 * 36, 3))

        def forward(self, x: Tensor) -> Tensor:
            out = self.conv(x)
            if out.mean() > 1e9:
                out = -out
            return out.view(len(x), -1) @ self.mix

    family = from_module(ByValue, whole=True)((1, 8, 8), 3)
    assert family.layout().groups == {HEAD: 3} and family.prunable() == ()
    assert count_macs(family) == 2 * 9 * 36 + 72 * 3
    x = torch.randn(2, 1, 8, 8).contiguous(memory_format=torch.channels_last)
    network = runnable(family, FULL, initial_params(family, 0)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert network(x).shape == (2, 3), "view works on maps that lie channels last"


class Scaled(nn.Module):
    """A layer over series (B, 7, 6) -> (B, 7, 8), and a parameter that no layer holds."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale, self.head = layer, nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.layer(x)[0] * self.scale).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 24)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=2))
        return (nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),)


@pytest.mark.parametrize(
    ("layer", "macs"),
    [
        (lambda: nn.LSTM(6, 4, bidirectional=True, batch_first=True), 2 * 7 * 4 * 4 * (6 + 4)),
        (Attention, 7 * 6 * 24 + 2 * 7 * 7 * 8),
    ],
    ids=["lstm", "attention"],
)
def test_a_network_as_a_whole_counts_what_one_kernel_computes(layer: Callable[[], nn.Module], macs: int) -> None:
    assert count_macs(from_module(lambda: Scaled(layer()), whole=True)((7, 6), 3)) == macs + 8 * 3


# ------------------------------------------------------------------------------------------------------- runs
MODULE = """
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(F.dropout(F.relu(self.fc(x.view(x.size(0), -1))), 0.1, training=self.training))
"""


def test_a_run_takes_a_module_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_folder: None, flexfleet: Any, quick: tuple[str, ...]
) -> None:
    (tmp_path / "net_of_a_run.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = [each for each in quick if not each.startswith("model.")]
    done = flexfleet("run", "--run-id", "one", sets=[*options, "model.name=net_of_a_run:Net"])
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "one" / "model.safetensors").is_file()


def test_a_configuration_gives_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_with_options.py").write_text(MODULE + "\nmade = Net(10)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trust(["net_with_options:Net", "net_with_options:made"])
    family: Any = build_model({"name": "net_with_options:Net", "whole": True}, (1, 8, 8), 10)
    assert family.layout().groups == {HEAD: 10}
    assert model_kind({"name": "net_with_options:Net"}) is model_kind({"name": "net_with_options:Net"})
    given: Any = build_model({"name": "net_with_options:made"}, (1, 8, 8), 10)
    assert list(given.weights()) == list(given.layout().slots)
    with pytest.raises(ModelError):
        build_model({"name": "net_with_options:made"}, (1, 8, 8), 7)

"""What `from_module` refuses: by module, line, reason and ways out; and the table of the guide."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.pool import layer_sizes
from fl_engine.core.slicing import initial_params, runnable, take
from fl_engine.core.types import HEAD
from fl_engine.core.widths import from_layer, prefix
from fl_engine.models.traced import from_module
from fl_engine.training.lanes import can_run
from tests.models import own_networks as nets

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-networks.md"


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


MIXING: dict[str, tuple[Any, dict[str, nn.Module], str]] = {
    "layer norm": (lambda m, x: m.norm(x), {"norm": nn.LayerNorm(8)}, "norm .*normalises over channels"),
    "one group": (lambda m, x: m.norm(x), {"norm": nn.GroupNorm(1, 8)}, "normalises over all channels, as one group"),
    "softmax": (lambda m, x: F.softmax(x, dim=-1), {}, "takes softmax over channels"),
    "softmax layer": (lambda m, x: m.soft(x), {"soft": nn.Softmax(1)}, "soft .*takes softmax over channels"),
    "mean": (lambda m, x: x - x.mean(1, keepdim=True), {}, "takes mean over channels"),
    "split": (lambda m, x: torch.cat(x.chunk(2, dim=1)[::-1], 1), {}, r"splits channels \(chunk\)"),
    "slice": (lambda m, x: torch.cat([x[:, 4:], x[:, :4]], 1), {}, r"takes some channels out \(x\[...\]\)"),
    "shuffle": (lambda m, x: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8), {}, "splits an axis of channels"),
    "product": (lambda m, x: (x[:, :, None] @ x[:, None, :]).sum(2), {}, "multiplies two activations as matrices"),
    "unknown layer": (lambda m, x: m.odd(x, x), {"odd": nn.Bilinear(8, 8, 8)}, "odd .*is a Bilinear, which is not"),
    "batch norm over": (
        lambda m, x: m.norm(x[:, None]).flatten(1),
        {"norm": nn.BatchNorm1d(1)},
        "norm .*normalises over channels",
    ),
    "convolution over": (
        lambda m, x: m.conv(x[:, None]).sum(1),
        {"conv": nn.Conv1d(1, 4, 1)},
        "conv .*is a convolution over channels",
    ),
    "no rule, added": (lambda m, x: x + x.flip(1), {}, "calls flip, which may mix channels"),
    "attention, added": (
        lambda m, x: x + m.att(x[:, None], x[:, None], x[:, None], need_weights=False)[0].mean(1),
        {"att": nn.MultiheadAttention(8, 2, batch_first=True)},
        "att .*is attention",
    ),
    "function": (lambda m, x: F.linear(x, torch.eye(8)), {}, "calls F.linear: make it an nn.Linear"),
    "slice up to a tensor": (
        lambda m, x: torch.cat([x[:, m.two :], x[:, : m.two]], 1),
        {},
        r"takes some channels out \(x\[...\]\)",
    ),
    "index by a tensor": (lambda m, x: x + x[:, m.two][:, None], {}, r"takes channels out by an index \(x\[...\]\)"),
    "index by a truth value": (lambda m, x: x[:, True].sum(1), {}, r"takes channels out by an index \(x\[...\]\)"),
    "axis that is a tensor": (lambda m, x: x[..., None].expand(-1, -1, 4).softmax(m.two).sum(2), {}, "calls softmax"),
    **{
        f"{name} over an axis that is a tensor": (
            lambda m, x, name=name: getattr(x[..., None].expand(-1, -1, 4), name)(m.two),
            {},
            # torch 2.9 (arm64) ignores a tensor as the axis, so there the network itself fails.
            f"calls {name}|cannot take a batch",
        )
        # torch 2.9 (arm64) ignores a tensor as the axis, so there these networks fail by themselves.
        for name in ("sum", "mean", "amax", "std", "logsumexp")
        if torch.ones(2, 3).sum(torch.tensor(1)).ndim == 1
    },
    "axes swapped by a tensor": (lambda m, x: x[..., None].transpose(m.two, 1).squeeze(1), {}, "calls transpose"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_channels_is_refused_with_the_line_and_both_ways_out(name: str) -> None:
    middle, layers, reason = MIXING[name]

    def build() -> nn.Module:
        return Between(middle, **layers)

    said = refused(build)
    assert re.search(reason, said), said
    assert re.search(r"\(test_traced_refusals\.py:\d+, ", said), said
    assert "choose an algorithm that sends the whole model, such as fedavg" in said
    pinned = re.search(r"or pin=\['(\w+)'\]", said)
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


class MixedBeforeItIsPinned(nn.Module):
    """The sum with the input, which pins the first convolution's channels, comes after what mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.added, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one = F.max_pool2d(torch.relu(self.mixed(torch.roll(y, 1, 3))), 2)
        return self.head((one + F.max_pool2d(self.added(y + x), 2)).flatten(1))


def test_of_what_is_mixed_the_channels_alone_are_in_doubt() -> None:
    """Not the pixels and samples: what pools or flattens these goes on being cut."""
    layout = from_module(MixedBeforeItIsPinned)((4, 6, 6), 3).layout()
    assert layout.groups == {"mixed": 8, HEAD: 3}


def test_a_batch_of_one_sample_keeps_its_axis() -> None:
    middle, _ = ALLOWED["squeeze"]
    family = from_module(lambda: Between(middle))((6,), 3)
    half = prefix(family.layout(), 1 / 8)
    network = runnable(family, half, take(initial_params(family, 0), family.layout(), half)).eval()
    assert network(torch.zeros(1, 6)).shape == (1, 3)


def test_a_layer_used_twice_has_the_same_channels_on_both_sides() -> None:
    middle, layers = ALLOWED["twice"]
    layout = from_module(lambda: Between(middle, **layers))((6,), 3).layout()
    assert [axis.group for axis in layout.slots["again.weight"].axes] == ["first", "first"]


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


def test_control_flow_on_values() -> None:
    said = refused(lambda: Odd(lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.b(-m.a(x)), **layers()))
    assert re.search(r"its forward \(test_traced_refusals.py:\d+, .*depends on values.*such as fedavg", said), said


def test_a_graph_that_differs_in_training() -> None:
    said = refused(lambda: Odd(lambda m, x: m.b(torch.relu(m.a(x)) if m.training else m.a(x)), **layers()))
    assert "does something else in training than in evaluation" in said and "test_traced_refusals.py" in said


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(lambda: float(torch.rand(())), "torch"), (np.random.rand, "numpy"), (random.random, "random")],
)
def test_control_flow_on_random_numbers(draw: Callable[[], float], whose: str) -> None:
    """Layers that are left out by chance (stochastic depth): a trace would leave them out always, or never."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) if not m.training or draw() < 1 else m.b(-m.a(x))  # where it is traced always the first

    said = refused(lambda: Odd(forward, **layers()))
    assert f"draws from {whose}'s generator apart from what is traced" in said and "such as fedavg" in said


def test_dropout_without_the_flag() -> None:
    said = refused(lambda: Odd(lambda m, x: m.b(F.dropout(m.a(x))), **layers()))
    assert "drops in evaluation too: give F.dropout training=self.training" in said


def test_several_inputs_and_several_outputs() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    assert "takes 2 inputs (x, y): a network here takes one" in refused(Two)
    assert "gives tuple, a tensor (B, 3) is expected" in refused(
        lambda: Odd(lambda m, x: (m.b(m.a(x)),) * 2, **layers())
    )


def test_tied_parameters() -> None:
    def build() -> nn.Module:
        module = Odd(lambda m, x: m.b(m.c(m.a(x))), **layers(c=nn.Linear(8, 8), d=nn.Linear(8, 8)))
        module.d.weight = module.c.weight
        return module

    assert "ties the parameters c.weight and d.weight" in refused(build)
    assert "ties the parameters" in refused(build, whole=True)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("whole", [False, True])
def test_a_weight_that_was_computed_when_the_network_was_made(whole: bool) -> None:
    said = refused(
        lambda: Odd(lambda m, x: m.b(m.a(x)), **layers(a=nn.utils.weight_norm(nn.Linear(6, 8)))), whole=whole
    )
    assert "a.weight is computed from other weights when the network is made" in said
    assert "torch.nn.utils.parametrizations has forms" in said


def test_parameters_without_use_and_other_types() -> None:
    said = refused(lambda: Odd(lambda m, x: m.b(m.a(x)), **layers(c=nn.Linear(8, 8))))
    assert "the loss does not depend on c.weight, c.bias: leave out what is not used, or freeze it" in said
    body = Odd(lambda m, x: m.b(m.a(x).double()).float(), **layers(b=nn.Linear(8, 3).double()))
    assert "b.weight is float64, float32 is expected" in refused(lambda: body, whole=True)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.last(x))


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("build", [Bare, Frozen])
def test_a_network_without_weights_to_train(build: Any, whole: bool) -> None:
    assert refused(build, whole=whole).startswith(f"{build.__name__} has no weights to train: ")


def test_grouped_convolutions() -> None:
    def build() -> nn.Module:
        parts = {"a": nn.Conv1d(2, 8, 1), "g": nn.Conv1d(8, 8, 3, groups=2), "b": nn.Linear(8, 3)}
        return Odd(lambda m, x: m.b(torch.relu(m.g(m.a(x))).mean(2)), **parts)

    said = refused(build, (2, 7))
    assert re.search(r"g \(.*\) is a convolution of 2 groups of 8 channels.*pin=\['g'\]", said), said
    assert from_module(build)((2, 7), 3, pin=("g",)).layout().groups == {HEAD: 3}


def test_buffers_that_nobody_averages() -> None:
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

    assert "training changes the buffer centre" in refused(lambda: Counting("centre"), whole=True)
    slots = from_module(lambda: Counting("centre_running_mean"), whole=True)((6,), 3).layout().slots
    assert list(slots) == ["centre_running_mean", "fc.weight", "fc.bias"]
    said = refused(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)))
    assert "1 has momentum=None" in said


def test_what_depends_on_the_number_of_channels_is_found_by_trying() -> None:
    said = refused(lambda: Between(lambda m, x: x / x.size(1)))
    assert "would differ from the full network's with the other channels zeroed" in said
    said = refused(lambda: Between(lambda m, x: x.reshape(shape=(len(x), 8))))
    assert re.search(r"its forward fails \(RuntimeError: .*\), so a size in it does not follow the channels", said)


def test_code_that_fails_is_told_with_its_line() -> None:
    said = refused(lambda: Between(lambda m, x: x.view(-1, 7)))
    assert re.search(r"cannot take a batch \(3, 6\) of float32 \(test_traced_refusals.py:\d+, .*RuntimeError", said), (
        said
    )
    assert "pin names the module 'frist', which there is not (did you mean 'first'?)" in refused(
        lambda: Between(lambda m, x: x), pin=("frist",)
    )
    assert "nothing to pin" in refused(lambda: Between(lambda m, x: x), whole=True, pin=("first",))
    with pytest.raises(ModelError, match=r"an nn\.Module, its class or a function that makes one is expected, got 3"):
        from_module(3)  # type: ignore[arg-type]


def test_algorithms_that_cut_refuse_a_whole_network_in_one_line() -> None:
    family = from_module(lambda: Between(lambda m, x: x), whole=True)((6,), 3)
    for cut in (lambda: layer_sizes(family), lambda: prefix(family.layout(), 0.5), lambda: from_layer(family, 0.5, 0)):
        with pytest.raises(
            PoolError, match="no channels that can be cut, and this algorithm trains sub-models"
        ) as told:
            cut()
        assert "\n" not in str(told.value)
    assert not can_run(family.module()), "clients train one at a time"


# ------------------------------------------------------------------------------------------ the guide's table
ROWS: list[tuple[str, Any, tuple[int, ...], dict[str, Any]]] = [
    ("ResNet18, torchvision's form", lambda: nets.ResNet18(10, 4), (3, 33, 33), {}),
    ("MobileNetV3-Small, torchvision's form", lambda: nets.MobileNetV3(10, 0.25), (3, 33, 33), {}),
    ("U-Net with a classifier", nets.UNetClassifier, (1, 8, 8), {}),
    ("1-D CNN with a depthwise layer", lambda: nets.Conv1dNet(10), (12, 3), {}),
    ("LSTM, two layers, both directions", lambda: nets.LSTMClassifier(10), (7,), {}),
    ("GPT-like block", lambda: nets.GPT(10), (5,), {}),
    ("GPT-like block", lambda: nets.GPT(10), (5,), {"pin": ("block.ln1",)}),
    ("GPT-like block", lambda: nets.GPT(10), (5,), {"pin": ("block.ln1", "block.attn")}),
    ("GPT-like block", lambda: nets.GPT(10), (5,), {"whole": True}),
]


def row(name: str, build: Any, shape: tuple[int, ...], options: dict[str, Any]) -> str:
    given = ", ".join(f"`{key}: {str(list(v) if isinstance(v, tuple) else v).lower()}`" for key, v in options.items())
    try:
        family = from_module(build)(shape, 10, **options)
    except ModelError as error:
        found = re.sub(r" \([^()]*\.py:.*?\) (?=[a-z])", " ", str(error).partition("sub-models: ")[2].partition(";")[0])
        return f"| {name} | {given or '-'} | refused | `{found.partition(' ')[0]}` {found.partition(' ')[2]} |"
    groups, pruned = len(family.layout().groups) - 1, len(family.prunable())
    what_of = "channel group" if groups == 1 else "channel groups"
    what = "trained as a whole" if family.whole else "cut"  # type: ignore[attr-defined]
    relus = sum(bool(layer.activations) for layer in family.prunable())
    said = f"{groups} {what_of}; a pool prunes {pruned}, {relus} of them by their ReLUs" if groups else "no sub-models"
    return f"| {name} | {given or '-'} | {what} | {said} |"


def test_the_guides_table_is_what_happens() -> None:
    """To renew it: write what this test expects."""
    head = ["| network | options | | what is cut, or why not |", "|---|---|---|---|"]
    wanted = "\n".join([*head, *(row(*each) for each in ROWS)])
    assert wanted in GUIDE.read_text(), wanted

"""Early exits: where they sit, what a sub-model that ends at one keeps, and that it computes what the whole does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import full_shapes, initial_params, runnable, shapes, take
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.core.widths import choose_exits, exit_name, up_to
from fl_engine.models import MODELS
from fl_engine.models.chains import SmallCNN
from fl_engine.testing.models import random_params, samples, zeroed
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from tests.harness.networks import SMALL

# Two exits each: the first block of a stage and the last, behind a map and behind a vector, before a pool and not.
EXITS = {
    "small_cnn": ("conv2", "fc1"),
    "vgg16": ("conv3", "fc1"),
    "resnet18": ("stage1.0", "stage3.1"),
    "resnet34": ("stage2.1", "stage4.0"),
    "preresnet18": ("stage1.1", "stage3.0"),
    "mobilenetv2": ("stage2.0", "stage5.1"),
    "mobilenetv3_ofa": ("stage2.0", "stage4.1"),
    "har_cnn": ("conv2", "fc2"),
    "aep_mlp": ("fc1", "fc4"),
    "epic_resnet18": ("stage1.1", "stage3.0"),
    "uthar_resnet18": ("stage1.0", "stage3.1"),
    "widar_resnet18": ("stage2.0", "stage4.0"),
}
NETWORKS: dict[str, Any] = dict(SMALL)
FAMILIES: dict[str, Any] = {name: dataclasses.replace(NETWORKS[name], exits=exits) for name, exits in EXITS.items()}
FAMILIES["tiny"] = TinyNet(exits=("conv", "fc"))
# Heads with convolutions: of some exits, and of one that may sit elsewhere.
CONVS: dict[str, Any] = {
    "resnet18, convs": dataclasses.replace(FAMILIES["resnet18"], exit_convs=(("stage1.0", 2), ("stage3.1", 1))),
    "mobilenetv2, convs": dataclasses.replace(FAMILIES["mobilenetv2"], exit_convs=(("stage5.1", 1),)),
    "epic_resnet18, convs": dataclasses.replace(FAMILIES["epic_resnet18"], exit_convs=(("stage1.1", 2),)),
    "har_cnn, convs": dataclasses.replace(FAMILIES["har_cnn"], exit_convs=(("conv2", 1),)),
    "small_cnn, convs": dataclasses.replace(FAMILIES["small_cnn"], exit_convs=(("conv3", 1), ("conv2", 2))),
}
FAMILIES |= CONVS
# The stem tied to the first stage, whose first block can then be dropped.
TIED = {"resnet34, tied": dataclasses.replace(FAMILIES["resnet34"], channels=(64, 128, 256, 512))}
FAMILIES |= TIED


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param]


def outputs(family: ModelFamily, spec: SubmodelSpec = FULL) -> list[int]:
    """Which of the full network's outputs the sub-model keeps."""
    heads = [exit_name(block) for block in family.exits]  # type: ignore[attr-defined]
    return [i for i, block in enumerate([*heads, family.layout().blocks[-1]]) if family.layout().has_block(spec, block)]


def truncations(family: ModelFamily) -> list[tuple[str, ...]]:
    """The first exit alone, both, the second alone, the classifier and the first, the classifier alone, and all."""
    first, second = family.exits  # type: ignore[attr-defined]
    heads, everything = (exit_name(first), exit_name(second)), up_to(family, None)
    return [
        up_to(family, first),
        up_to(family, second),
        tuple(b for b in up_to(family, second) if b != heads[0]),
        tuple(b for b in everything if b != heads[1]),
        tuple(b for b in everything if b not in heads),
        everything,
    ]


def narrowings(family: ModelFamily) -> list[dict[str, Sequence[int]]]:
    """All channels, a prefix of each group, and two thirds of each, scattered."""
    groups = family.layout().groups
    prefix = {group: range((n + 1) // 2) for group, n in groups.items()}
    return [{}, prefix, {group: [i for i in range(n) if i % 3 != 1] for group, n in groups.items()}]


def specs(family: ModelFamily) -> list[SubmodelSpec]:
    return [SubmodelSpec.of(keep, blocks) for blocks in truncations(family) for keep in narrowings(family)]


def run(family: ModelFamily, spec: SubmodelSpec, params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        logits: tuple[Tensor, ...] = runnable(family, spec, params).eval()(x)
    return logits


def test_every_network_is_tested_here() -> None:
    with_exits = {name for name, family in MODELS.items() if hasattr(family, "exit_points")}
    assert set(FAMILIES) == {*with_exits, *CONVS, *TIED, "tiny"}


# -------------------------------------------------------------------------------------------- where exits sit


# ------------------------------------------------------------------------------------------------ sub-networks
def test_the_state_is_that_of_the_layout(family: Any) -> None:
    for variant in (family, dataclasses.replace(family, norm="static") if hasattr(family, "norm") else family):
        layout, full, params = variant.layout(), full_shapes(variant), initial_params(variant, 0)
        for spec in specs(variant):
            with torch.device("meta"):
                state = variant.module(spec).state_dict()
            assert list(state) == [name for name, slot in layout.slots.items() if layout.has_block(spec, slot.block)]
            assert {name: tuple(t.shape) for name, t in state.items()} == shapes(layout, spec, full)
            assert list(take(params, layout, spec)) == list(state)
            assert count_params(variant, spec) == sum(t.numel() for t in state.values())


def test_a_truncated_network_computes_the_full_ones_logits(family: Any) -> None:
    params, x = initial_params(family, 1), samples(family, 4)
    full = run(family, FULL, params, x)
    assert len({tuple(out.flatten().tolist()) for out in full}) == 3, "exits that answer alike would prove nothing"
    for blocks in truncations(family):
        spec = SubmodelSpec.of({}, blocks)
        logits = run(family, spec, take(params, family.layout(), spec), x)
        for mine, theirs in zip(logits, [full[i] for i in outputs(family, spec)], strict=True):
            assert torch.equal(mine, theirs)


def test_without_its_heads_it_is_the_network_without_exits(family: Any) -> None:
    plain, params, x = dataclasses.replace(family, exits=()), initial_params(family, 1), samples(family, 4)
    bare = {name: t for name, t in params.items() if not name.startswith("exit_")}
    assert_same_bits(bare, initial_params(plain, 1))
    with torch.no_grad():
        expected = runnable(plain, FULL, bare).eval()(x)
    assert torch.equal(run(family, FULL, params, x)[-1], expected)


def test_a_slice_runs_like_the_full_network_with_the_rest_zeroed(family: Any) -> None:
    static = dataclasses.replace(family, norm="static") if hasattr(family, "norm") else family
    layout, params, x = static.layout(), random_params(static), samples(static, 2).double()
    for keep in narrowings(static):
        narrow, rows = SubmodelSpec.of(keep), list(keep.get("classes", range(static.outputs)))
        with torch.no_grad():
            full = zeroed(static, narrow, params)(x)
        for blocks in truncations(static):
            spec = SubmodelSpec.of(keep, blocks)
            logits = run(static, spec, take(params, layout, spec), x)
            for mine, theirs in zip(logits, [full[i] for i in outputs(static, spec)], strict=True):
                torch.testing.assert_close(mine, theirs[:, rows], rtol=1e-7, atol=1e-9)


def test_a_head_with_convolutions_by_hand() -> None:
    family = SmallCNN((1, 8, 8), 4, width=0.25, norm="static", exits=("conv1",), exit_convs=(("conv1", 1),))
    params, x = random_params(family), samples(family, 3).double()
    spec = SubmodelSpec.of({}, up_to(family, "conv1"))

    def unit(x_bchw: Tensor, name: str) -> Tensor:
        of = {entry: params.get(f"{name}.{entry}") for entry in ("conv.weight", "conv.bias")}
        out = F.conv2d(x_bchw, of["conv.weight"], of["conv.bias"], padding=1)  # type: ignore[arg-type]
        mean, var, weight, bias = (params[f"{name}.bn.{e}"] for e in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(out, mean, var, weight, bias).relu()

    pooled = unit(unit(x, "conv1"), "exit_conv1.conv1").mean((2, 3))
    expected = pooled @ params["exit_conv1.linear.weight"].T + params["exit_conv1.linear.bias"]
    (found,) = run(family, spec, take(params, family.layout(), spec), x)
    torch.testing.assert_close(found, expected)


def test_an_algorithm_that_chooses_exits_counts_their_heads() -> None:
    """The convolutions of a head can make a level too large for the exit that it would have."""
    plain = SmallCNN((1, 8, 8), 10)
    heavy = dataclasses.replace(plain, exit_convs=(("conv3", 8),))
    assert choose_exits(plain, (1.0, 1.0), (60.0, 100.0)) == ("conv3",)
    assert choose_exits(heavy, (1.0, 1.0), (60.0, 100.0)) == ("conv2",)


# ------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    "options",
    [
        {"exits": ("conv9",)},
        {"exits": ("classifier",)},
        {"exits": ("conv3", "conv1")},
        {"exit_convs": (("nowhere", 1),)},
        {"exit_convs": (("conv1", 1), ("conv1", 2))},
        {"exit_convs": (("conv1", 9),)},
    ],
    ids=str,
)
def test_impossible_exits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as error:
        SmallCNN((1, 8, 8), 10, **options)
    assert error.value.path == f"model.{next(iter(options))}"


def test_head_behind_a_vector_cannot_have_convolutions() -> None:
    family = SmallCNN((1, 8, 8), 10, exits=("fc1",), exit_convs=(("fc1", 2),))
    with pytest.raises(ModelError):
        family.layout()


@pytest.mark.parametrize(
    "blocks",
    [
        "conv1 conv2 exit_conv2 conv3 fc1",
        "conv1 exit_conv2",
        "conv1 conv2 conv3 exit_fc1",
        "conv1 conv2 exit_conv1",
    ],
)
def test_impossible_truncation_is_refused(blocks: str) -> None:
    with pytest.raises(ModelError):
        FAMILIES["small_cnn"].module(SubmodelSpec.of({}, blocks.split()))

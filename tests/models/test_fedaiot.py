"""The networks of FedAIoT: how they are cut, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.core.errors import ModelError
from fl_engine.core.pool import measure_apoz
from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.core.widths import prefix
from fl_engine.models.fedaiot_resnet18 import EpicResNet18, UTHARResNet18, WidarResNet18
from fl_engine.models.recurrent import CasasBiLSTM, WisdmLSTM


def test_both_directions_read_the_whole_sequence() -> None:
    family = CasasBiLSTM((4,), 2, vocabulary=5, width=0.1)
    module = family.module().eval()
    seen = []
    module[1].register_forward_hook(lambda _, __, out: seen.append(out))  # type: ignore[index]
    for tokens in ([1, 2, 3, 4], [2, 2, 3, 4], [1, 2, 3, 3]):
        module(torch.tensor([tokens]))
    forwards, backwards = zip(*(out.detach().chunk(2, dim=1) for out in seen), strict=True)
    for way in (forwards, backwards):
        assert not torch.equal(way[0], way[1]), "the first token"
        assert not torch.equal(way[0], way[2]), "the last token"


def test_group_norm_is_cut_by_pairs_one_of_each_half() -> None:
    layout = WidarResNet18((2, 4, 4), 3, width=0.25).layout()
    assert layout.groups["stage1"] == 8, "pairs: 16 channels"
    params = {"stem.norm.weight": torch.arange(16), "stage1.0.conv1.conv.weight": torch.arange(256).view(16, 16, 1, 1)}
    cut = take(params, layout, SubmodelSpec.of({"stage1": [1, 6]}))
    assert cut["stem.norm.weight"].tolist() == [1, 6, 9, 14]
    assert cut["stage1.0.conv1.conv.weight"][0].flatten().tolist() == [16 + c for c in (1, 6, 9, 14)]


@pytest.mark.parametrize(
    "family",
    [UTHARResNet18((1, 70, 30), 4, width=0.25), WidarResNet18((3, 5, 6), 4, width=0.25)],
    ids=["uthar", "widar"],
)
def test_group_normed_slice_equals_network_built_at_that_width(family: Any) -> None:
    """It differs from the whole network with the rest zeroed, because statistics cover only the existing channels."""
    layout, params = family.layout(), initial_params(family, 0)
    x = made_up(family, 3, torch.Generator().manual_seed(0))
    spec, narrow = prefix(layout, 0.5), replace(family, width=family.width / 2)
    cut = take(params, layout, spec)
    zeroed = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    places = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in params.items()}
    for name, kept in take(places, layout, spec).items():
        zeroed[name].view(-1)[kept.flatten()] = cut[name].flatten()
    with torch.no_grad():
        sliced = runnable(family, spec, cut).eval()(x)
        built = runnable(narrow, FULL, cut).eval()(x)
        whole = runnable(family, FULL, zeroed).eval()(x)
    assert torch.equal(sliced, built)
    assert not torch.allclose(sliced, whole, rtol=1e-2)


def test_a_stem_as_wide_as_the_first_stage_is_tied_to_it() -> None:
    tied = EpicResNet18((1, 40, 40), 4, stem=64, width=0.1)
    assert "stem" not in tied.layout().groups
    assert "stage1.0.shortcut.conv.weight" not in tied.layout().slots
    assert "stage1.0.shortcut.conv.weight" in replace(tied, stem=128).layout().slots
    kept = [block for block in tied.layout().blocks if block != "stage1.0"]
    tied.module(SubmodelSpec.of({}, kept))
    with pytest.raises(ModelError):
        replace(tied, stem=128).module(SubmodelSpec.of({}, kept))


@pytest.mark.parametrize("late", [True, False])
def test_where_a_block_has_its_stride(late: bool) -> None:
    family: Any = WidarResNet18((2, 20, 20), 3) if late else EpicResNet18((1, 64, 64), 3)
    with torch.device("meta"):
        block: Any = family.module().get_submodule("stage2.0")
    strides = block.conv1.conv.stride[0], block.conv2.conv.stride[0], block.shortcut.conv.stride[0]
    assert strides == ((1, 2, 2) if late else (2, 1, 2))
    assert (block.shortcut.conv.bias is not None) == late


def test_a_layer_without_a_relu_has_no_measured_apoz() -> None:
    family = WisdmLSTM((5, 2), 3)
    params = initial_params(family, 0)
    params["fc1.linear.weight"].zero_()
    params["fc1.linear.bias"].fill_(-1)
    assert measure_apoz(family, params, torch.randn(4, 5, 2)) == (0.5, 1.0), "the LSTM counts as half zeros"
    tokens = CasasBiLSTM((5,), 3, vocabulary=9, width=0.1)
    assert measure_apoz(tokens, initial_params(tokens, 0), made_up(tokens, 4)) == (0.5, 0.5)

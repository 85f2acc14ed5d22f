"""The networks for text: sizes by hand, layers beside those of torch, what a position sees, and slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_engine.core import pool
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.types import FULL, HEAD, SubmodelSpec
from fl_engine.models.text import EPSILON, TextLSTM, TextTransformer

LSTM_SMALL = TextLSTM((6,), 11, embedding=5, hidden=7)
SHAKESPEARE = TextLSTM(TextLSTM.published_input, TextLSTM.published_outputs)
TRANSFORMER_SMALL = TextTransformer((6,), 11, layers=2, heads=3, head_size=4, embedding=8, hidden=20)
STACK_OVERFLOW = TextTransformer(TextTransformer.published_input, TextTransformer.published_outputs)

FAMILIES = {"text_lstm": LSTM_SMALL, "text_transformer": TRANSFORMER_SMALL}


def tokens(count: int) -> Tensor:
    return made_up(LSTM_SMALL, count, torch.Generator().manual_seed(3))


def built(family: ModelFamily) -> nn.Module:
    return runnable(family, FULL, initial_params(family, 0)).eval()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_position_sees_itself_and_what_is_before_it(family: ModelFamily) -> None:
    module, x = built(family), tokens(1)
    with torch.no_grad():
        before = module(x)
        for position in range(6):
            changed = x.clone()
            changed[0, position] = (x[0, position] + 1) % 11
            after = module(changed)
            assert torch.equal(after[..., :position], before[..., :position])
            assert (after[..., position:] != before[..., position:]).any(1).all()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_the_last_answer_is_that_of_the_last_position(family: Any) -> None:
    last = replace(family, answers="last")
    assert list(last.layout().slots) == list(family.layout().slots)
    x = tokens(4)
    with torch.no_grad():
        torch.testing.assert_close(built(last)(x), built(family)(x)[..., -1])


def test_lstm_parameters_by_hand() -> None:
    """Adaptive Federated Optimization's network has 820,522, with one bias of a gate instead of two."""
    first, second = 4 * 256 * (8 + 256), 4 * 256 * (256 + 256)
    theirs = 90 * 8 + (first + 4 * 256) + (second + 4 * 256) + (256 * 90 + 90)
    assert theirs == 820_522
    assert count_params(SHAKESPEARE) == theirs + 2 * 4 * 256 == 822_570


def test_lstm_multiply_adds_by_hand() -> None:
    """Embeddings cost nothing."""
    first, second = 4 * 256 * (8 + 256), 4 * 256 * (256 + 256)
    assert count_macs(SHAKESPEARE) == 80 * (first + second + 256 * 90) == 65_413_120
    assert count_macs(replace(SHAKESPEARE, answers="last")) == 80 * (first + second) + 256 * 90
    cut = SubmodelSpec.of({"lstm1": [3, 5, 250], "lstm2": 10})
    assert count_macs(SHAKESPEARE, cut) == 80 * (4 * 3 * (8 + 3) + 4 * 10 * (3 + 10) + 10 * 90)


def test_lstm_unit_is_cut_from_all_gates_and_the_lstm_above() -> None:
    family = TextLSTM((6,), 2, embedding=2, hidden=3)
    params = {
        "embedding.weight": torch.arange(4).view(2, 2),
        "lstm1.cells.weight_ih_l0": torch.arange(24).view(12, 2),
        "lstm1.cells.weight_hh_l0": torch.arange(36).view(12, 3),
        "lstm1.cells.bias_hh_l0": torch.arange(12),
        "lstm2.cells.weight_ih_l0": torch.arange(36).view(12, 3),
        "classifier.weight": torch.arange(6).view(2, 3),
    }
    cut = take(params, family.layout(), SubmodelSpec.of({"embedding": [1], "lstm1": [0, 2], "lstm2": [1]}))
    rows = [0, 2, 3, 5, 6, 8, 9, 11]
    assert cut["embedding.weight"].flatten().tolist() == [1, 3]
    assert cut["lstm1.cells.weight_ih_l0"].flatten().tolist() == [2 * row + 1 for row in rows]
    assert cut["lstm1.cells.weight_hh_l0"].tolist() == [[3 * row, 3 * row + 2] for row in rows]
    assert cut["lstm1.cells.bias_hh_l0"].tolist() == rows
    assert cut["lstm2.cells.weight_ih_l0"].tolist() == [[3 * row, 3 * row + 2] for row in (1, 4, 7, 10)]
    assert cut["classifier.weight"].flatten().tolist() == [1, 4]


def test_transformer_parameters_by_hand() -> None:
    layer = (96 * 288 + 288) + (96 * 96 + 96) + 2 * (96 + 96) + (96 * 2048 + 2048) + (2048 * 96 + 96)
    around = (128 * 96 + 96) + (96 * 128 + 128)
    assert count_params(STACK_OVERFLOW) == 10_004 * 128 + 20 * 128 + 3 * layer + around + (128 * 10_004 + 10_004)
    assert count_params(STACK_OVERFLOW) == 3_897_364


def test_transformer_multiply_adds_by_hand() -> None:
    """At 20 positions; embeddings cost nothing, a norm 4 for each number."""
    linear = 96 * 288 + 96 * 96 + 2 * 96 * 2048
    products = 2 * 8 * 20 * 20 * 12  # queries with keys, scores with values, of each head
    layer = 20 * linear + products + 2 * 4 * 20 * 96
    assert count_macs(STACK_OVERFLOW) == 3 * layer + 20 * (2 * 96 * 128 + 128 * 10_004) == 52_183_040
    two = SubmodelSpec.of({"layer1.heads": [1, 7]})
    assert count_macs(STACK_OVERFLOW) - count_macs(STACK_OVERFLOW, two) == 20 * 6 * 12 * 96 * 4 + products * 6 // 8


def test_a_layer_is_torchs() -> None:
    """`nn.TransformerEncoderLayer` with a causal mask, which has other names for the same weights."""
    family = TextTransformer((7,), 11, layers=1, heads=3, head_size=4, embedding=8, hidden=20)
    layer = built(family).get_submodule("layer1")
    theirs = nn.TransformerEncoderLayer(12, 3, 20, 0.1, "relu", EPSILON, batch_first=True).eval()
    names = {
        "self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.", "linear1.": "hidden.linear.",
        "linear2.": "shrink.", "norm1.": "norm1.", "norm2.": "norm2.",
    }  # fmt: skip
    given = {name: torch.randn(t.shape) for name, t in layer.state_dict().items()}
    layer.load_state_dict(given)
    theirs.load_state_dict({t + leaf: given[o + leaf] for t, o in names.items() for leaf in ("weight", "bias")})
    x = torch.randn(5, 7, 12)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), theirs(x, src_mask=mask, is_causal=True), rtol=1e-5, atol=1e-5)


def test_transformer_measures_apoz_of_hidden_units_only() -> None:
    scores = pool.measure_apoz(TRANSFORMER_SMALL, initial_params(TRANSFORMER_SMALL, 0), tokens(20))
    by_group = dict(zip([layer.group for layer in TRANSFORMER_SMALL.prunable()], scores, strict=True))
    measured = [score for group, score in by_group.items() if group.endswith("hidden")]
    assert len(measured) == 2 and all(0.1 < score < 0.9 and score != pool.UNMEASURED for score in measured)
    assert {s for g, s in by_group.items() if not g.endswith("hidden")} == {pool.UNMEASURED}
    assert [g for g in TRANSFORMER_SMALL.layout().groups if g != HEAD] == list(by_group)

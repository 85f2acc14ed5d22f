"""The Transformer for text: its size by hand, its layers beside torch's, what a position sees, and what slices keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_engine.core import pool
from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.types import FULL, HEAD, SubmodelSpec
from fl_engine.models.text_transformer import EPSILON, Attention, TextTransformer

SMALL = TextTransformer((6,), 11, layers=2, heads=3, head_size=4, embedding=8, hidden=20)
STACK_OVERFLOW = TextTransformer(TextTransformer.published_input, TextTransformer.published_outputs)


def tokens(count: int, family: TextTransformer = SMALL) -> Tensor:
    return made_up(family, count, torch.Generator().manual_seed(3))


def built(family: TextTransformer) -> nn.Module:
    return runnable(family, FULL, initial_params(family, 0)).eval()


# ------------------------------------------------------------------------------------------------------ sizes
def test_parameters_by_hand() -> None:
    layer = (96 * 288 + 288) + (96 * 96 + 96) + 2 * (96 + 96) + (96 * 2048 + 2048) + (2048 * 96 + 96)
    around = (128 * 96 + 96) + (96 * 128 + 128)
    assert count_params(STACK_OVERFLOW) == 10_004 * 128 + 20 * 128 + 3 * layer + around + (128 * 10_004 + 10_004)
    assert count_params(STACK_OVERFLOW) == 3_897_364


def test_multiply_adds_by_hand() -> None:
    """At 20 positions; embeddings cost nothing, a norm 4 for each number."""
    linear = 96 * 288 + 96 * 96 + 2 * 96 * 2048
    products = 2 * 8 * 20 * 20 * 12  # queries with keys, scores with values, of each head
    layer = 20 * linear + products + 2 * 4 * 20 * 96
    assert count_macs(STACK_OVERFLOW) == 3 * layer + 20 * (2 * 96 * 128 + 128 * 10_004) == 52_183_040
    two = SubmodelSpec.of({"layer1.heads": [1, 7]})
    assert count_macs(STACK_OVERFLOW) - count_macs(STACK_OVERFLOW, two) == 20 * 6 * 12 * 96 * 4 + products * 6 // 8


# ------------------------------------------------------------------------------------------------ the network
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


def test_a_position_sees_itself_and_what_is_before_it() -> None:
    module, x = built(SMALL), tokens(1)
    with torch.no_grad():
        before = module(x)
        for position in range(6):
            changed = x.clone()
            changed[0, position] = (x[0, position] + 1) % 11
            after = module(changed)
            assert torch.equal(after[..., :position], before[..., :position])
            assert (after[..., position:] != before[..., position:]).any(1).all()


def test_a_tokens_place_counts() -> None:
    module = built(SMALL)
    with torch.no_grad():
        out = module(torch.full((1, 6), 4))
    assert (out[..., 1:] != out[..., :-1]).any(1).all()


def test_the_last_answer_is_that_of_the_last_position() -> None:
    last = TextTransformer((6,), 11, answers="last", layers=2, heads=3, head_size=4, embedding=8, hidden=20)
    assert list(last.layout().slots) == list(SMALL.layout().slots)
    x = tokens(4)
    with torch.no_grad():
        torch.testing.assert_close(built(last)(x), built(SMALL)(x)[..., -1])
    assert count_macs(last) == count_macs(SMALL) - 5 * (12 * 8 + 8 * 11)


# ----------------------------------------------------------------------------------------------------- slices
def test_a_head_is_kept_whole() -> None:
    """Head 1 of three has four numbers of each: queries 4 to 7, keys 16 to 19, values 28 to 31."""
    rows = {"layer1.attention.qkv.weight": torch.arange(36)[:, None].expand(-1, 12)}
    spec = SubmodelSpec.of({"layer1.heads": [1]})
    (found,) = take(rows, SMALL.layout(), spec).values()
    assert found[:, 0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]
    columns = {"layer1.attention.out.weight": torch.arange(12).expand(12, -1)}
    (found,) = take(columns, SMALL.layout(), spec).values()
    assert found[0].tolist() == [4, 5, 6, 7]
    kept = SMALL.module(spec).get_submodule("layer1.attention")
    assert isinstance(kept, Attention) and (kept.heads, kept.size) == (1, 4)


def test_transformer_measures_apoz_of_hidden_units_only() -> None:
    scores = pool.measure_apoz(SMALL, initial_params(SMALL, 0), tokens(20))
    by_group = dict(zip([layer.group for layer in SMALL.prunable()], scores, strict=True))
    measured = [score for group, score in by_group.items() if group.endswith("hidden")]
    assert len(measured) == 2 and all(0.1 < score < 0.9 and score != pool.UNMEASURED for score in measured)
    assert {s for g, s in by_group.items() if not g.endswith("hidden")} == {pool.UNMEASURED}
    assert [g for g in SMALL.layout().groups if g != HEAD] == list(by_group)

"""The LSTM for text: its size by hand, its steps beside an LSTM of linear layers, and what slices keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.models.text_lstm import TextLSTM

SMALL = TextLSTM((6,), 11, embedding=5, hidden=7)
SHAKESPEARE = TextLSTM(TextLSTM.published_input, TextLSTM.published_outputs)


def tokens(count: int, family: TextLSTM = SMALL) -> Tensor:
    return made_up(family, count, torch.Generator().manual_seed(3))


def built(family: TextLSTM) -> nn.Module:
    return runnable(family, FULL, initial_params(family, 0)).eval()


class ByHand(nn.Module):
    """The same network of linear layers: its gates are i, f, g and o, each of which takes the input and the output of
    the step before."""

    def __init__(self, family: TextLSTM) -> None:
        super().__init__()
        self.hidden = family.hidden
        self.embedding = nn.Embedding(family.vocabulary, family.embedding)
        sizes = [family.embedding, *[family.hidden] * family.layers]
        self.given = nn.ModuleList(nn.Linear(size, 4 * family.hidden) for size in sizes[:-1])
        self.kept = nn.ModuleList(nn.Linear(family.hidden, 4 * family.hidden) for _ in sizes[:-1])
        self.classifier = nn.Linear(family.hidden, family.outputs)

    def forward(self, x_bt: Tensor) -> Tensor:
        x = self.embedding(x_bt)
        for given, kept in zip(self.given, self.kept, strict=True):
            h = c = x.new_zeros(len(x), self.hidden)
            put_out = []
            for step in x.unbind(1):
                i, f, g, o = (given(step) + kept(h)).chunk(4, dim=1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                put_out.append(h)
            x = torch.stack(put_out, dim=1)
        logits: Tensor = self.classifier(x)
        return logits.transpose(1, 2)


# ------------------------------------------------------------------------------------------------------ sizes
def test_parameters_by_hand() -> None:
    """Adaptive Federated Optimization's network has 820,522, with one bias of a gate instead of two."""
    first, second = 4 * 256 * (8 + 256), 4 * 256 * (256 + 256)
    theirs = 90 * 8 + (first + 4 * 256) + (second + 4 * 256) + (256 * 90 + 90)
    assert theirs == 820_522
    assert count_params(SHAKESPEARE) == theirs + 2 * 4 * 256 == 822_570


def test_multiply_adds_by_hand() -> None:
    """Embeddings cost nothing."""
    first, second = 4 * 256 * (8 + 256), 4 * 256 * (256 + 256)
    assert count_macs(SHAKESPEARE) == 80 * (first + second + 256 * 90) == 65_413_120
    assert count_macs(replace(SHAKESPEARE, answers="last")) == 80 * (first + second) + 256 * 90
    cut = SubmodelSpec.of({"lstm1": [3, 5, 250], "lstm2": 10})
    assert count_macs(SHAKESPEARE, cut) == 80 * (4 * 3 * (8 + 3) + 4 * 10 * (3 + 10) + 10 * 90)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_lstm_of_linear_layers_gives_the_same(layers: int) -> None:
    family = replace(SMALL, layers=layers)
    params = initial_params(family, 2)
    theirs = ByHand(family)
    names = {"embedding.weight": "embedding.weight"}
    for layer in range(layers):
        for part, letter in (("given", "ih"), ("kept", "hh")):
            for leaf in ("weight", "bias"):
                names[f"{part}.{layer}.{leaf}"] = f"lstm{layer + 1}.cells.{leaf}_{letter}_l0"
    names |= {f"classifier.{leaf}": f"classifier.{leaf}" for leaf in ("weight", "bias")}
    theirs.load_state_dict({name: params[ours] for name, ours in names.items()})
    x = tokens(4)
    with torch.no_grad():
        torch.testing.assert_close(runnable(family, FULL, params).eval()(x), theirs(x))


# ------------------------------------------------------------------------------------------------ the network
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


def test_the_last_answer_is_that_of_the_last_position() -> None:
    last = replace(SMALL, answers="last")
    assert list(last.layout().slots) == list(SMALL.layout().slots)
    x = tokens(4)
    with torch.no_grad():
        torch.testing.assert_close(built(last)(x), built(SMALL)(x)[..., -1])


# ----------------------------------------------------------------------------------------------------- slices
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

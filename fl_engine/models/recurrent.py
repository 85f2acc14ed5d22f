"""LSTMs for time series and tokens, sliced by hidden unit. In torch, a unit is one row of every gate's weights.

A unit whose weights are all zero outputs zero at every step. Therefore a sliced layer computes the same outputs as the
full layer with the weights of all other units set to zero. The small LSTMs of several clients run as one large LSTM, in
which weights between units of different clients are zero. Clients with bidirectional LSTMs train one at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis
from fl_engine.models.layers import FREE, Inside, Layer, LayerMaker, axis_of, noted
from fl_engine.models.network import Network

GATES = 4
MOST_UNITS = 24
"""Maximum number of units of an LSTM that combines several clients. With more units, multiplications by zero take
longer than separate calls."""
WISDM_UNITS = {"lstm": 6, "fc1": 128}
DROPOUT = 0.2
CASAS_UNITS = {"embedding": 64, "lstm": 64}
PADDING = 0


@cache
def _together(hidden: int) -> int:
    """Return the number of clients that a CPU runs as one LSTM. Without AVX-512, the number is 1, because oneDNN's
    rounding depends on the position of a unit."""
    return max(1, MOST_UNITS // hidden) if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 1


class Cells(nn.LSTM):
    """Unidirectional LSTM with one layer and batch-first inputs."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(features, hidden, batch_first=True)

    def in_lanes(self) -> nn.Module:
        return _Lanes()


class _Lanes(nn.Module):
    """Map the series (B, n*T, F) of n stacked clients to the outputs at all steps, (B, n*T, hidden)."""

    weight_ih_l0: Tensor
    """(n, 4*hidden, F)."""
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor]:
        weights = [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]
        lanes, hidden = len(weights[0]), weights[1].shape[2]
        together = 1 if lanes == 1 else _together(hidden)
        x_nbtf = x.reshape(len(x), lanes, -1, x.shape[2]).transpose(0, 1)
        # Pad the stacked clients with zeros, so that torch always chooses the same kernels.
        given = [F.pad(t, (0, 0) * (t.dim() - 1) + (0, -lanes % together)) for t in (x_nbtf, *weights)]
        parts = zip(*(torch.split(t, together) for t in given), strict=True)
        out_nbth = torch.cat([_side_by_side(*part) for part in parts])[:lanes]
        return (out_nbth.transpose(0, 1).flatten(1, 2),)


def _side_by_side(x_nbtf: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """Map (n, B, T, F) to (n, B, T, hidden) with one LSTM of n*hidden units, ordered by gate, client and unit."""
    n, hidden = len(w_ih), w_hh.shape[2]
    if n == 1:
        weights, x = [w_ih[0], w_hh[0], b_ih[0], b_hh[0]], x_nbtf[0]
    else:
        weights = [_diagonal(w_ih), _diagonal(w_hh), *(_by_gate(b).flatten() for b in (b_ih, b_hh))]
        x = x_nbtf.movedim(0, 2).flatten(2)
    start = x.new_zeros(1, len(x), n * hidden)
    out_bth: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, True, False, True)[0]
    return out_bth.view(*x.shape[:2], n, hidden).movedim(2, 0)


def _by_gate(rows: Tensor) -> Tensor:
    """Reshape (n, 4*hidden, ...) to (4, n, hidden, ...)."""
    return rows.reshape(len(rows), GATES, -1, *rows.shape[2:]).transpose(0, 1)


def _diagonal(weight: Tensor) -> Tensor:
    """Return a block-diagonal matrix (4*n*hidden, n*columns) of the clients' weights (4*hidden, columns)."""
    of_ghcn = _by_gate(weight).permute(0, 2, 3, 1)
    return torch.diag_embed(of_ghcn).permute(0, 3, 1, 4, 2).flatten(0, 2).flatten(1)


class Steps(nn.Module):
    """Map a series (B, T, F) to the outputs of an LSTM at all steps, (B, T, hidden)."""

    def __init__(self, make: LayerMaker, inside: Inside, units: Axis) -> None:
        super().__init__()
        self.cells = noted_lstm(Cells(make.width(inside), make.width(units)), inside, units)

    def forward(self, x_btf: Tensor) -> Tensor:
        out: Tensor = self.cells(x_btf)[0]
        return out


class BothEnds(nn.Module):
    """Map a series (B, T, F) to the last outputs of the forward and the backward direction, (B, 2 * hidden)."""

    def __init__(self, make: LayerMaker, inside: Inside, units: Axis) -> None:
        super().__init__()
        cells = nn.LSTM(make.width(inside), make.width(units), batch_first=True, bidirectional=True)
        self.cells = noted_lstm(cells, inside, units)

    def forward(self, x_btf: Tensor) -> Tensor:
        last: Tensor = self.cells(x_btf)[1][0]
        return last.transpose(0, 1).flatten(1)


def noted_lstm(layer: Layer, inside: Inside, units: Axis) -> Layer:
    """Record the axes of an LSTM with one layer. In a bidirectional LSTM, a channel is one unit in each direction."""
    gates, features = replace(units, copies=GATES), axis_of(inside)
    axes = {"weight_ih_l0": (gates, features), "weight_hh_l0": (gates, units), "bias_ih_l0": (gates,)}
    axes["bias_hh_l0"] = (gates,)
    return noted(layer, **axes, **{f"{name}_reverse": each for name, each in axes.items()})


@dataclass(frozen=True)
class WisdmLSTM(Network):
    """FedAIoT's LSTM for WISDM (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of
    Things, Michigan State University 2023, section 2.3.3.1). The network classifies activities from 200 steps of the
    sensors in a phone or a watch.

    The layers are an LSTM with 6 hidden units, a hidden layer with 128 units and ReLU, and the classifier. The hidden
    layer receives the LSTM's outputs at all steps. Dropout 0.2 precedes both linear layers. For 200x6 inputs and 12
    classes, the network has 155,612 parameters.

    Groups: lstm, fc1, classes. Blocks: lstm, fc1, classifier. FlexFL sets the APoZ of the LSTM to `pool.UNMEASURED`,
    because an LSTM has no ReLU. Each of the six units has about a sixth of all parameters, so the sizes of FlexFL's
    models differ from the target sizes by up to 8 percentage points.
    """

    input_shape: tuple[int, int]

    axes: ClassVar[tuple[str, ...]] = ("steps", "features")
    channels_of = WISDM_UNITS
    published_input: ClassVar[tuple[int, ...]] = (200, 6)
    published_outputs: ClassVar[int] = 12

    def build(self, make: LayerMaker) -> nn.Module:
        steps, features = self.input_shape
        units, hidden = Axis("lstm"), Axis("fc1")
        # Create fc1 first, because the initial weights depend on the order in which layers are created.
        fc1 = make.dense(replace(units, copies=steps), hidden)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            lstm=Steps(make, features, units),
            flatten=nn.Flatten(),
            dropout1=nn.Dropout(DROPOUT),
            fc1=fc1,
            dropout2=nn.Dropout(DROPOUT),
            classifier=make.linear(hidden, Axis(HEAD)),
        )
        return nn.Sequential(layers)


@dataclass(frozen=True)
class CasasBiLSTM(Network):
    """FedAIoT's BiLSTM for CASAS (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of
    Things, Michigan State University 2023, section 2.3.3.5), after Liciotti et al., Neurocomputing 2019. The network
    classifies activities in a home from sensor events.

    The network has embeddings of size 64 and an LSTM with 64 hidden units in each direction. The embedding of token 0
    (padding) is zero. The classifier receives the last output of each direction. For 2,000 tokens and 12 classes, the
    network has 196,108 parameters.

    Departs from the authors' code, in which the classifier uses the outputs of both directions at the last event. At
    the last event, the backward direction has read only one event. Here, as in Liciotti et al., each direction reads
    all events before its output is used.

    Groups: embedding, lstm (a channel is one unit in each direction), classes. Blocks: embedding, lstm, classifier.
    FlexFL sets the APoZ of both layers to `pool.UNMEASURED`, because the layers have no ReLU.
    """

    input_shape: tuple[int]
    vocabulary: int = 2000
    """Number of tokens, including padding. Tokens are 0 to vocabulary - 1, and token 0 is padding."""

    axes: ClassVar[tuple[str, ...]] = ("tokens",)
    channels_of = CASAS_UNITS
    published_input: ClassVar[tuple[int, ...]] = (2000,)
    published_outputs: ClassVar[int] = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("vocabulary")

    def build(self, make: LayerMaker) -> nn.Module:
        numbers, units = Axis("embedding"), Axis("lstm")
        embedding = nn.Embedding(self.vocabulary, make.width(numbers), padding_idx=PADDING)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=noted(embedding, weight=(FREE, numbers)),
            lstm=BothEnds(make, numbers, units),
            classifier=make.linear(replace(units, copies=2), Axis(HEAD)),
        )
        return nn.Sequential(layers)

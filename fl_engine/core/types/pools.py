"""Model pools: the sub-models that an algorithm uses, with their costs and codecs; and the layers that it may prune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fl_engine.core.types.submodels import Header, Params, SubmodelSpec


class Codec(Protocol):
    """Encodes weights for transfer. A frozen dataclass of options with pure functions.

    It encodes contiguous floating-point tensors on the CPU, sorted by name: weights on the way down, the change of the
    received weights on the way up. Running statistics and integers are sent unencoded. The names of the encoded tensors
    begin with a given name, or contain a slash (which no parameter's name does), and do not begin with `state/`.
    """

    def encode(self, tensors: Params, seed: int) -> Params:
        """Return the tensors to send. All randomness follows from `seed`, which differs for each round and direction,
        on the way up for each client, and on the way down for each level. Raises ModelError for numbers that it cannot
        express."""

    def decode(self, encoded: Params, header: Header) -> Params:
        """Return tensors of these types and shapes. `encoded` may come from a stranger: it has the names, types and
        shapes of `header`, and any content. Raises IntegrityError for content that `encode` never makes."""

    def header(self, header: Header) -> Header:
        """Return the header of the encoded tensors. A flat tensor of uint8 is a stream, which may be shorter. Fewer or
        smaller tensors never need more."""


@dataclass(frozen=True)
class Codecs:
    """The codec of each direction; None sends weights unencoded."""

    down: Codec | None = None
    up: Codec | None = None


@dataclass(frozen=True)
class Prunable:
    """A layer, or block of layers, that a pool may prune: the group of its width, the name prefixes of its parameters
    (their size gives AdjW, FlexFL Eq. 3), and its ReLU modules (APoZ, FlexFL Eq. 1-2; an LSTM has none)."""

    group: str
    params: tuple[str, ...]
    activations: tuple[str, ...]


@dataclass(frozen=True)
class PoolModel:
    """One member of a model pool.

    Attributes:
        params: Number of parameters.
        share: `params` over those of the full model.
        macs: Multiply-adds per sample.
        dispatched: The server sends it; other members are reached only by pruning on the device.
        reported: It counts in the mean accuracy.
        gamma: How the pool search found it, with `ratios` per prunable layer; None if it was not searched.
        ensemble: Its output is the mean of the logits of all exits, otherwise that of the last exit.
        static_bn: Its batch norm uses statistics collected on the training data instead of the batch's.
        codecs: None: those of the run.
        sizes: Bytes of its tensors on the way down and up; None: 4 for each parameter. A maximum if a codec's bytes
            depend on the numbers.
        tiers: The tiers of the fleet that are sent this model, each with its codecs (None: the run's). If no member of
            a pool names tiers, the selection decides.
    """

    name: str
    spec: SubmodelSpec
    params: int
    share: float
    macs: int
    dispatched: bool
    reported: bool
    gamma: float | None = None
    ratios: tuple[float, ...] = ()
    ensemble: bool = False
    static_bn: bool = False
    codecs: Codecs | None = None
    sizes: tuple[int, int] | None = None
    tiers: tuple[tuple[str, Codecs | None], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes on the way down."""
        return 4 * self.params if self.sizes is None else self.sizes[0]

    @property
    def bytes_up(self) -> int:
        """Bytes on the way up, if all of it comes back."""
        return 4 * self.params if self.sizes is None else self.sizes[1]


Pool = tuple[PoolModel, ...]
"""Members from the smallest to the largest."""

Prepared = Mapping[str, Any]
"""The results of an algorithm's preparations, by the preparation's name (`contracts.Preparation`)."""

"""Model pools: the sub-models that an algorithm uses, with what each costs; and the layers that a pool prunes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fl_engine.core.types.submodels import Header, Params, SubmodelSpec


class Codec(Protocol):
    """Turns weights into other tensors for their way. A frozen dataclass of options, whose functions depend on their
    arguments alone.

    It gets floating-point tensors, contiguous, on the CPU, sorted by name; running statistics and integers travel
    uncoded. On the way down these are weights, on the way up the change against the weights that were received. The
    names of the tensors that it makes begin with a name that it was given, or contain a slash, which no name of a
    network does; they do not begin with `state/`.
    """

    def encode(self, tensors: Params, seed: int) -> Params:
        """The tensors that travel instead. Every random choice follows from `seed`. It differs for each round and
        direction, and on the way up for each client; on the way down clients that are sent models of one level share
        it. Raises ModelError for numbers that it cannot express."""

    def decode(self, encoded: Params, header: Header) -> Params:
        """Tensors of these types and shapes. `encoded` may come from a stranger: it has the names, types and shapes
        that `header` gives, and any content. Raises IntegrityError for content that `encode` never makes."""

    def header(self, header: Header) -> Header:
        """The header of what `encode` makes from tensors with this header. A flat tensor of uint8 is a stream, which
        may be shorter than said here. Fewer or smaller tensors never make more."""


@dataclass(frozen=True)
class Codecs:
    """The codec of each direction; None: weights travel as they are."""

    down: Codec | None = None
    up: Codec | None = None


@dataclass(frozen=True)
class Prunable:
    """One layer (or block of layers) as a pool prunes it: the group that sets its width, the name prefixes of
    its parameters (its size counts for AdjW, FlexFL Eq. 3), and its ReLU modules (APoZ, FlexFL Eq. 1-2); none where it
    has no ReLU, as an LSTM (`pool.UNMEASURED`)."""

    group: str
    params: tuple[str, ...]
    activations: tuple[str, ...]


@dataclass(frozen=True)
class PoolModel:
    """One member of a model pool, with what it costs.

    `share` is its parameter count over the full model's; `macs` counts multiply-adds per sample; `dispatched`
    members are sent by the server, the others are reached only by pruning on the device; `reported` members
    enter the mean accuracy. `gamma` and `ratios` (per prunable layer) say how it was found, where it was.

    How it is used: with `ensemble`, its answer is the mean of the logits of all its exits, otherwise that of the
    last; with `static_bn`, its batch norm takes statistics collected on the training data instead of the batch's.

    How it travels: by `codecs` (None: those of the run). `sizes` are the bytes of its tensors on the way down and up
    (None: 4 for each parameter); where a codec's bytes depend on the numbers, the most.

    `tiers` names the tiers of the fleet whose devices are sent this model, each with its codecs (None: the run's).
    Where no member of a pool names any, the selection decides.
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
        """Bytes on the way up, where all of it comes back."""
        return 4 * self.params if self.sizes is None else self.sizes[1]


Pool = tuple[PoolModel, ...]
"""Members from the smallest to the largest."""

Prepared = Mapping[str, Any]
"""The results of an algorithm's preparations, by the preparation's name (`contracts.Preparation`)."""

"""Codecs: what turns weights into other tensors for their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fl_engine.core.types.submodels import Header, Params


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

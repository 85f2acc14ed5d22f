"""The state that clients keep from one round that they take part in to the next (`KeepsClientState`): its names on the
way, and its declared size."""

from __future__ import annotations

import re

import torch

from fl_engine.core.contracts import ModelFamily, keeps_client_state
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import Header, Params, Pool

STATE = "state/"
"""The prefix of its names in an order's memory and in an update's file. No parameter's name begins like this."""
NAME = re.compile(r"[A-Za-z0-9_./-]{1,256}")

Shapes = dict[str, tuple[int, ...]]
"""By name; numbers are float32."""


def kept_by_clients(algorithm: object, family: ModelFamily, pool: Pool) -> Shapes:
    """What the algorithm declares that each client keeps; empty where it keeps nothing. Raises ConfigError where the
    declaration is wrong."""
    if not keeps_client_state(algorithm):
        if hasattr(algorithm, "client_state"):
            raise ConfigError(
                f"{type(algorithm).__name__} declares what clients keep (client_state), and lacks begin or keep: it "
                "needs all three"
            )
        return {}
    found: Shapes = {}
    for name, shape in algorithm.client_state(family, pool).items():
        sizes = tuple(shape)
        if NAME.fullmatch(name) is None:
            wrong = "a name is 1 to 256 letters, digits and _ . / -"
        elif not all(isinstance(size, int) and size > 0 for size in sizes):
            wrong = f"a shape is a tuple of positive integers, got {shape!r}"
        else:
            found[name] = sizes
            continue
        raise ConfigError(f"{type(algorithm).__name__} declares {name!r} as state of a client: {wrong}")
    return found


def header(declared: Shapes) -> Header:
    """Return the types and shapes of the tensors of a state with these declared shapes."""
    return {name: (torch.float32, shape) for name, shape in declared.items()}


def travelling(state: Params) -> Params:
    """The state with the names that it has on the way."""
    return {STATE + name: tensor for name, tensor in state.items()}


def apart(tensors: Params) -> tuple[Params, Params]:
    """(all but the state, the state by its own names) of an order's memory or an update's file."""
    if not tensors:
        return {}, {}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(STATE)}
    return others, {n.removeprefix(STATE): tensor for n, tensor in tensors.items() if n.startswith(STATE)}

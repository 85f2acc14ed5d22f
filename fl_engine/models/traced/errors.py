"""What cannot be cut, and how the user is told: the module, the line, the reason, both ways out."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fl_engine.core.errors import ModelError

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def path_of(node: Any) -> str:
    """The module in whose forward the node runs, or which it is; "" for the network itself."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def line_of_error(error: BaseException) -> str:
    """The line of the user's that raised it, as `source_line`."""
    return source_line((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def line_now() -> str:
    """The line of the user's that runs now, as `source_line`."""
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    return source_line(reversed(calls))


def source_line(frames: Iterable[tuple[str, int]]) -> str:
    """` (net.py:12, x = self.norm(x))` of the innermost frame that is the user's; "" where there is none."""
    own = [(file, line) for file, line in frames if not file.startswith(_OURS)]
    if not own:
        return ""
    file, line = own[-1]
    code = linecache.getline(file, line).strip()
    return f" ({Path(file).name}:{line}{f', {code}' if code else ''})"


AS_IT_IS = "choose an algorithm that sends the whole model, such as fedavg, which trains the network as it is"


def ways_out(pins: Iterable[str] = ()) -> str:
    """How to train such a network all the same."""
    names = ", ".join(repr(name) for name in pins)
    pinned = f", or pin=[{names}], which keeps all channels there and cuts the others" if names else ""
    return f"{AS_IT_IS}{pinned}"


UNTRACED = (
    "A trace loses torch.no_grad(), torch.autocast, autograd.Function and hooks of modules, and what a forward changes "
    f"in its module. Use x.detach() instead, or {AS_IT_IS} (docs/guides/own-networks.md)"
)
"""Why a traced network differs from its module."""
UNBOUND = (
    "A copy of it gets other weights: let the forward read parameters and buffers as attributes of their modules, and "
    "change buffers in place"
)
"""Why a network that is not traced differs from its module."""


def refusal(network: str, node: Any, why: str, pins: Iterable[str]) -> ModelError:
    """The error for a node of a trace."""
    return ModelError(f"{network} cannot be cut into sub-models: {place_of(node)} {why}; {ways_out(pins)}")


def place_of(node: Any) -> str:
    """The module and the line of a node."""
    return f"{path_of(node) or 'its forward'}{node.meta.get('line', '')}"

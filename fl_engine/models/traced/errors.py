"""Errors about a user's module: the place in its code, the reason and the ways out."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fl_engine.core.errors import ModelError

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

WHOLE_MODEL = "choose an algorithm that sends the whole model, such as fedavg, which trains the network as it is"
UNTRACED = (
    "A trace loses torch.no_grad(), torch.autocast, autograd.Function, hooks of modules and what a forward changes in "
    f"its module. Use x.detach() instead, or {WHOLE_MODEL} (docs/guides/own-networks.md)"
)
UNBOUND = (
    "A copy of it gets other weights: let the forward read parameters and buffers as attributes of their modules, and "
    "change buffers in place"
)


def path_of(node: Any) -> str:
    """The path of the module whose forward contains the node; "" for the network itself."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def place_of(node: Any) -> str:
    return f"{path_of(node) or 'its forward'}{node.meta.get('line', '')}"


def line_of_error(error: BaseException) -> str:
    return source_line((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def line_now() -> str:
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    return source_line(reversed(calls))


def source_line(frames: Iterable[tuple[str, int]]) -> str:
    """` (net.py:12, x = self.norm(x))` of the innermost frame in the user's code; "" if there is none."""
    own = [(file, line) for file, line in frames if not file.startswith(_OURS)]
    if not own:
        return ""
    file, line = own[-1]
    code = linecache.getline(file, line).strip()
    return f" ({Path(file).name}:{line}{f', {code}' if code else ''})"


def ways_out(pins: Iterable[str] = ()) -> str:
    names = ", ".join(repr(name) for name in pins)
    pinned = f", or pin=[{names}], which keeps all channels there and cuts the others" if names else ""
    return f"{WHOLE_MODEL}{pinned}"


def cannot_cut(network: str, why: str, pins: Iterable[str] = ()) -> ModelError:
    return ModelError(f"{network} cannot be cut into sub-models: {why}; {ways_out(pins)}")


def failed(name: str, what: str, error: Exception) -> ModelError:
    """The error for an exception of the user's code."""
    said = " ".join(str(error).split()) or type(error).__name__
    return ModelError(f"{name} {what}{line_of_error(error)}: {type(error).__name__}: {said}")

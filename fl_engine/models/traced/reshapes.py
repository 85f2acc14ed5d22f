"""Sizes written into a forward that a sub-model's would differ from: `view(-1, 512)`, `expand(8, 64, 1, 1)`."""

from __future__ import annotations

from typing import Any

from torch import fx

from fl_engine.models.traced.channels import Dim, free, resolved
from fl_engine.models.traced.flow import Flow
from fl_engine.models.traced.graph import Traced, name_of
from fl_engine.models.traced.refusals import path_of, refusal

_SIZED = ("view", "reshape", "expand")


def with_any_width(name: str, traced: Traced, flow: Flow) -> None:
    """Replaces such sizes, in place, by -1 or by what the input has; `view` becomes `reshape`, since a batch of maps
    lies channels last in memory. Raises ModelError for a size that neither can replace."""
    for node in list(traced.graph.nodes):
        if node.op not in ("call_method", "call_function") or name_of(node) not in _SIZED:
            continue
        given = node.args[0]
        if not isinstance(given, fx.Node) or node.meta["shape"] is None or not node.args[1:]:
            continue
        packed = isinstance(node.args[1], tuple | list)
        sizes = list(node.args[1] if packed else node.args[1:])
        out, old = flow.dims[node], flow.dims[given]
        if name_of(node) == "expand":
            sizes = [-1 if _cut(dim) and isinstance(n, int) else n for dim, n in zip(out, sizes, strict=True)]
        else:
            _widened(name, traced, node, sizes, old, out)
            if node.target == "view":
                node.target = "reshape"
        node.args = (given, tuple(sizes)) if packed else (given, *sizes)


def _cut(dim: Dim) -> bool:
    return bool(free(dim))


def _widened(name: str, traced: Traced, node: fx.Node, sizes: list[Any], old: Any, out: Any) -> None:
    """Makes the sizes of a reshape, in place, fit any width."""
    written = [place for place, dim in enumerate(out) if _cut(dim) and isinstance(sizes[place], int)]
    for place in [place for place in written if sizes[place] != -1]:
        same = next((axis for axis, dim in enumerate(old) if resolved(dim) == resolved(out[place])), None)
        if same is not None:
            sizes[place] = _size(traced, node, same)
        elif -1 not in sizes:
            sizes[place] = -1
        elif sizes[0] == -1 and resolved(old[0]) == resolved(out[0]):  # the batch
            sizes[0], sizes[place] = _size(traced, node, 0), -1
        else:
            other = sizes.index(-1)
            if _cut(out[other]) or other == 0:
                why = f"has the size {sizes[place]} written into {name_of(node)}, which -1 cannot replace"
                path = path_of(node)
                raise refusal(name, node, why, [path] if path else [])
            sizes[other], sizes[place] = node.meta["shape"][other], -1


def _size(traced: Traced, node: fx.Node, axis: int) -> fx.Node:
    """A node that gives the size of an axis of the reshape's input."""
    with traced.graph.inserting_before(node):
        return traced.graph.call_method("size", (node.args[0], axis))

"""Replaces sizes in a forward that would not fit a sub-model: `view(-1, 512)`, `expand(8, 64, 1, 1)`, and `squeeze()`,
which would remove the channels of a sub-model that has one, and the batch of one sample."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from fl_engine.models.traced.channels import Dim, free, resolved
from fl_engine.models.traced.errors import cannot_cut, path_of, place_of
from fl_engine.models.traced.flow import Flow
from fl_engine.models.traced.graph import Traced, attribute, name_of

_SIZED = ("view", "reshape", "expand")


def with_any_width(name: str, traced: Traced, flow: Flow) -> None:
    """Replace such sizes, in place, by -1 or by those of the input. `view` becomes `reshape`, because a batch of maps
    is channels last in memory; `squeeze()` gets its axes. Raises ModelError if neither is possible."""
    for node in list(traced.graph.nodes):
        layer = attribute(traced.module, str(node.target)) if node.op == "call_module" else None
        called = name_of(node) if node.op in ("call_method", "call_function") else ""
        if isinstance(layer, nn.Unflatten):
            _unflattened(node, layer.dim, flow)
        elif called == "unflatten":
            _unflattened(node, node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0), flow)
        elif called == "squeeze":
            _squeezed(traced, node)
        if called not in _SIZED:
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


def _unflattened(node: fx.Node, dim: Any, flow: Flow) -> None:
    """Set the size of the axis of channels to -1; the other new axes have one entry."""
    given: Any = _given(node)
    old, out = flow.dims[given], flow.dims[node]
    axis = dim % len(old)
    new = out[axis : axis + len(out) - len(old) + 1]
    if any(map(_cut, new)):
        node.op, node.target, node.kwargs = "call_method", "unflatten", {}
        node.args = (given, axis, tuple(-1 if _cut(each) else 1 for each in new))


def _squeezed(traced: Traced, node: fx.Node) -> None:
    """Let `squeeze()` remove the axes that had one entry in the trace, whose batch has several samples: one after the
    other, because torch cannot export several at once to ONNX."""
    given: Any = _given(node)
    if len(node.args) > 1 or "dim" in node.kwargs:
        return
    single = [axis for axis, size in enumerate(given.meta["shape"]) if size == 1]
    if not single:
        node.replace_all_uses_with(given)
        traced.graph.erase_node(node)
        return
    for axis in reversed(single[1:]):
        with traced.graph.inserting_before(node):
            given = traced.graph.call_method("squeeze", (given, axis))
    node.args, node.kwargs = (given, single[0]), {}


def _given(node: fx.Node) -> Any:
    """The input of the operation."""
    return node.args[0] if node.args else node.kwargs["input"]


def _cut(dim: Dim) -> bool:
    return bool(free(dim))


def _widened(name: str, traced: Traced, node: fx.Node, sizes: list[Any], old: Any, out: Any) -> None:
    """Change the sizes of a reshape, in place, so that they fit any width."""
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
                raise cannot_cut(name, f"{place_of(node)} {why}", [path] if path else [])
            sizes[other], sizes[place] = node.meta["shape"][other], -1


def _size(traced: Traced, node: fx.Node, axis: int) -> fx.Node:
    """A node with the size of an axis of the reshape's input."""
    with traced.graph.inserting_before(node):
        return traced.graph.call_method("size", (node.args[0], axis))

"""Lets the teachers of a self-distillation reuse outputs of the student's layers with equal weights and input.

In FlexFL's self-KD a teacher consists of leading channels of the student. In a group that it keeps in full, its layers
equal the student's; in FlexFL's pools those are the first layers, which cost most. The reused tensor is the one that
the layer would compute, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fl_engine.training.lanes import Dropout, Network

Seen = dict[str, tuple[Tensor, Tensor]]
"""The last input and output of each layer of the student, by name."""


@contextmanager
def shared(student: Network, teachers: Sequence[Network]) -> Iterator[Seen]:
    """In the context, the student's forward pass stores the outputs of common layers in the yielded dictionary, and the
    teachers use them. Call the student first, and clear the dictionary after each batch. Weights of equal name and
    shape must be the same tensors. The student is in training mode; teachers in evaluation mode reuse only layers that
    compute the same in both modes."""
    layers, seen = dict(student.module.named_modules()), Seen()
    changed: list[nn.Module] = []
    names = set()
    for teacher in teachers:
        for name, layer in teacher.module.named_modules():
            differs = _draws(layer) if teacher.module.training else _depends_on_mode(layer)
            if name in layers and _alike(name, student, teacher) and not differs:
                layer.forward = partial(_reuse, seen, name, layer.forward)
                changed.append(layer)
                names.add(name)
    hooks = [layers[name].register_forward_hook(partial(_keep, seen, name)) for name in names]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for layer in changed:
            del layer.forward


def _alike(name: str, a: Network, b: Network) -> bool:
    """Whether the layer contains the same layers, of the same shapes, in both networks."""
    return _inside(name, a) == _inside(name, b)


def _inside(name: str, network: Network) -> tuple[dict[str, type], dict[str, tuple[int, ...]]]:
    first = f"{name}." if name else ""
    layers = {n: type(layer) for n, layer in network.module.named_modules() if n == name or n.startswith(first)}
    return layers, {n: shape for n, shape in network.shapes.items() if n.startswith(first)}


def _draws(layer: nn.Module) -> bool:
    return any(isinstance(inner, Dropout) and inner.p > 0 for inner in layer.modules())


_BY_MODE = (Dropout, _DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


def _depends_on_mode(layer: nn.Module) -> bool:
    """Whether it may compute something else in evaluation than in training (except batch norm, see `lanes.evaluates`).
    Classes from elsewhere might."""
    known = ("torch.nn.", "fl_engine.")
    return any(isinstance(inner, _BY_MODE) or not type(inner).__module__.startswith(known) for inner in layer.modules())


def _keep(seen: Seen, name: str, _: nn.Module, given: tuple[Any, ...], out: Any) -> None:
    if len(given) == 1 and isinstance(out, Tensor):
        seen[name] = given[0], out


def _reuse(seen: Seen, name: str, compute: Callable[..., Any], *given: Any) -> Any:
    known = seen.get(name)
    return known[1] if known is not None and len(given) == 1 and given[0] is known[0] else compute(*given)

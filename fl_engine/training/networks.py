"""A cache of networks prepared for lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import blank
from fl_engine.core.types import FULL, HEAD, Axis, LocalTask, ParamLayout, SubmodelSpec
from fl_engine.training.lanes import Network

NETWORKS_KEPT = 64
_free: dict[object, list[Network]] = {}
"""Networks not in use, by their sub-model and scaler. Building one takes as long as a small step."""


@contextmanager
def lent(family: ModelFamily, task: LocalTask) -> Iterator[Network]:
    """Lend the network of the sub-model `task.spec`, in training mode, until the context ends."""
    what = (family, family.layout().form(task.spec), task.spec.kept.get(HEAD), task.scaler)
    free = _free.setdefault(what, [])
    try:
        network = free.pop()
    except IndexError:
        network = _built(family, task)
    yield network
    network.release()
    if not network.module.training:
        network.module.train()
    if len(_free) > NETWORKS_KEPT:  # rolling windows (FedRolex) hardly ever repeat a sub-model
        _free.clear()
    _free.setdefault(what, []).append(network)


def _built(family: ModelFamily, task: LocalTask) -> Network:
    with torch.device("meta"):
        network = Network(blank(family, task.spec).train())
    divide_outputs(family, task, network.weighted)
    return network


def divide_outputs(family: ModelFamily, task: LocalTask, weighted: Mapping[str, nn.Module]) -> None:
    """HeteroFL's scaler: divide the outputs of every convolution and hidden linear layer by the rate, or by the share
    of them that the sub-model keeps. Outputs that no sub-model cuts are not divided, and neither are those of an
    LSTM."""
    if task.scaler == 1:
        return
    layout = family.layout()
    for name, layer in weighted.items():
        slot = layout.slots.get(f"{name}.weight")
        if slot is None:  # frozen
            continue
        outputs = slot.axes[1] if isinstance(layer, _ConvTransposeNd) else slot.axes[0]
        if outputs.group == HEAD or all(part.group is None for part in outputs.parts):
            continue
        rate = kept_share(layout, task.spec, outputs) if task.scaler == "by_layer" else task.scaler
        if rate != 1:
            layer.register_forward_hook(lambda _, __, out, rate=rate: out / rate)


def kept_share(layout: ParamLayout, spec: SubmodelSpec, axis: Axis) -> float:
    """The share of an axis that a sub-model keeps."""
    full, kept = (
        sum(part.each * (1 if part.group is None else layout.width(of, part.group)) for part in axis.parts)
        for of in (FULL, spec)
    )
    return kept / full

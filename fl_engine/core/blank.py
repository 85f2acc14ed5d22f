"""Networks without weights: their modules, names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.types import FULL, SubmodelSpec


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def blank(family: ModelFamily, spec: SubmodelSpec = FULL) -> nn.Module:
    """The sub-network on torch's meta device; it allocates nothing.

    No first weights are drawn. An embedding's would import torch's compiler there: two seconds in every process, and in
    every client's pod.
    """
    with torch.device("meta"), _Undrawn():
        return family.module(spec)

"""Any `nn.Module` as a network here: `from_module`.

An algorithm that sends the whole model trains the module as it is. For other algorithms its forward is traced with
torch.fx, and the channels are followed through it: a layer makes channels, the next one takes them, and tensors that
are added have the same channels. From that follow the groups, slots and prunable layers that the networks in
`fl_engine.models` write by hand. An operation that would mix channels is refused, with the place and the ways out.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.models.traced.family import ModuleFamily
from fl_engine.models.traced.user_module import Build, check_callable, makes_module, name_of

__all__ = ["from_module", "makes_module"]

_kinds: dict[tuple[Any, bool, tuple[str, ...]], type[ModelFamily]] = {}


def from_module(build: Build, *, whole: bool = False, pin: tuple[str, ...] = ()) -> type[ModelFamily]:
    """The family of the networks that `build` makes: a class or a function, which is called with those of the keywords
    `input_shape`, `outputs` and `num_classes` that it has, or a module, whose weights are the first ones.

    `whole` and `pin` are the defaults of the family's options: train the network without sub-models; modules, by their
    path, all of whose channels every sub-model keeps. The same arguments give the same class. The family, made with the
    data's shape and number of outputs, raises ModelError for a module that cannot be trained or cut.
    """
    if not makes_module(build):
        raise ModelError(f"an nn.Module, its class or a function that makes one is expected, got {build!r}")
    check_callable(build)
    if isinstance(pin, str) or not all(isinstance(each, str) for each in pin):
        raise ModelError(f"pin is a tuple of module paths, such as ('encoder.norm',), got {pin!r}")
    key = (build, whole, tuple(pin))
    if key not in _kinds:
        module, qualified = name_of(build)
        options = [("whole", bool, field(default=whole)), ("pin", tuple[str, ...], field(default=tuple(pin)))]
        made: Any = make_dataclass(
            qualified.rpartition(".")[2], options, bases=(ModuleFamily,), frozen=True, namespace={"build": (build,)}
        )
        made.__module__, made.__qualname__ = module, qualified
        _kinds[key] = made
    return _kinds[key]


def rebuilt(build: Build, input_shape: tuple[int, ...], outputs: int, whole: bool, pin: tuple[str, ...]) -> Any:
    """A family that another process has pickled."""
    kind: Any = from_module(build)
    return kind(input_shape, outputs, whole, pin)

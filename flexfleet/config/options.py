"""List the values of all parameters that a run uses, including the defaults of its algorithm and its network.

Values of `training` are the values that the algorithm actually uses. For example, FedSGD trains one local step. If
`algorithm.selection` is null, the algorithm's own selection strategy is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from fl_engine.core.allowed import OURS
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import masked
from fl_engine.core.fields import Moves, adapter
from fl_engine.core.types import Pool
from fl_engine.models.build import with_defaults
from flexfleet.config.read import flatten
from flexfleet.config.schema import Config, moves

BACKENDS = ("kubernetes", "agents")
"""Sections that are used only if `run.backend` has the same name."""
COMMANDS = ("central", "tune")
"""Sections that federated runs do not use."""


def options_of(config: Config, method: Algorithm, pool: Pool) -> dict[str, Any]:
    """Map the dotted names of all parameters to values. The value of a strategy is its name, or a mapping with the name
    and the changed options if these differ from the defaults."""
    own: dict[str, Any] = {"algorithm.name": config.algorithm["name"]}
    for field in fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if field.name == "training":
            own |= {f"training.{each.name}": _value(getattr(value, each.name)) for each in fields(value)}
        else:
            own[f"algorithm.{field.name}"] = _value(value)
    if "algorithm.selection" in own and own["algorithm.selection"] is None and hasattr(method, "selector"):
        own["algorithm.selection"] = _value(method.selector(pool))
    own |= network_options(config)
    rest = {
        key: value
        for key, value in flatten(config).items()
        if not key.startswith("algorithm.") and not any(key.startswith(f"{whole}.") for whole in own)
    }
    return rest | own


def network_options(config: Config) -> dict[str, Any]:
    """Map the dotted names of the network's options to values."""
    return {f"model.{name}": _value(value) for name, value in with_defaults(config.model).items()}


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the values of parameters into two mappings: values that determine the results of a run, which never change,
    and all other values that are used. Passwords in addresses are masked."""
    unused = {*COMMANDS, *(name for name in BACKENDS if values.get("run.backend") != name), "schema_version"}
    used = {
        key: masked(value) if isinstance(value, str) else value
        for key, value in values.items()
        if key.partition(".")[0] not in unused
    }
    results = {key: value for key, value in used.items() if moves(key) is Moves.RESULT}
    return results, {key: value for key, value in used.items() if key not in results}


def _value(value: Any) -> Any:
    """Convert the value to JSON types."""
    plain_value, kind = to_jsonable_python(value, fallback=str), type(value)
    if not is_dataclass(value):
        return plain_value
    ours = kind.__module__.partition(".")[0] in OURS
    # A user's class may inherit `name` from a flexfleet class, so identify the user's class by its import path.
    if (name := plain_value.get("name") if ours else f"{kind.__module__}:{kind.__qualname__}") is None:
        return plain_value
    given = adapter(kind).dump_python(value, mode="json", exclude_defaults=True, exclude={"name"})
    return {"name": name, **given} if given else name

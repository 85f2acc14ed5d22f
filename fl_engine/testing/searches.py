"""What the search space of an algorithm has to hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fl_engine.core.contracts import Algorithm, ChoosesNetwork, Interval, ModelFamily, Searched
from fl_engine.core.errors import BadInput
from fl_engine.core.types import Pool
from fl_engine.testing.tiny import tiny_pool

VALUES = (None, 0, 0.001, 1000)
"""What else a searched parameter may be: switched off, very small or very large."""


def check_search(algorithm: Algorithm, family: ModelFamily) -> None:
    """A study begins with the algorithm as it is configured: a parameter that is searched has a value in its range, or
    the algorithm says where the search starts. So it is for every one of VALUES that the algorithm takes, in the place
    of a searched parameter or of the section that it is in."""
    if not isinstance(algorithm, Searched):
        return
    for setting in (algorithm, *_others(algorithm, family)):
        for path, interval in setting.search_space(_pool(setting, family)).items():
            value = _at(_values(setting), path.split("."))
            start = interval.start if value is None else value
            assert _holds(interval, start), f"{path} is {value}, and is searched in {interval}: {setting}"


def _others(algorithm: Any, family: ModelFamily) -> Iterator[Any]:
    kind = TypeAdapter(type(algorithm))
    searched = [path.split(".") for path in algorithm.search_space(_pool(algorithm, family))]
    for path in sorted({tuple(parts[: i + 1]) for parts in searched for i in range(len(parts))}):
        for value in VALUES:
            values = _values(algorithm)
            section = _at(values, path[:-1])
            if not isinstance(section, dict):  # an entry of a list, which is searched as a whole
                continue
            section[path[-1]] = value
            try:
                other = kind.validate_json(TypeAdapter(dict).dump_json(values))
                _pool(other, family)
            except (ValidationError, BadInput):
                continue
            yield other


def _pool(algorithm: Any, family: ModelFamily) -> Pool:
    return tiny_pool(algorithm, algorithm.network(family) if isinstance(algorithm, ChoosesNetwork) else family)


def _values(algorithm: Any) -> dict[str, Any]:
    """The fields, as a configuration has them."""
    values: dict[str, Any] = TypeAdapter(type(algorithm)).dump_python(algorithm, mode="json")
    return values


def _at(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(values, Mapping):
            values = values[part]
        elif isinstance(values, Sequence) and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values


def _holds(interval: Interval, value: Any) -> bool:
    if interval.choices:
        return value in interval.choices
    ends = interval.low, interval.high
    return None not in (value, *ends) and bool(ends[0] <= value <= ends[1])

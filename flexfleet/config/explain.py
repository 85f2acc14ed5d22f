"""Explains to a person what is wrong with a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from fl_engine.core.errors import did_you_mean, masked, nearest
from fl_engine.core.fields import is_model
from fl_engine.core.registry import COMPLETE, UNKNOWN
from flexfleet.config.form_fields import SHORT

EXPECTED = "input should be "
"""How most of pydantic's messages begin."""
SEARCHED = "tune.space."
"""Begins what is said of a parameter that a study searches: its keys are dotted names."""


def explain(error: ValidationError, root: Any, prefix: str = "") -> str:
    """One clause for each thing that is wrong, by its dotted name below `prefix`."""
    return "; ".join(dict.fromkeys(_clauses([(_Place.of(root, e["loc"]), e) for e in error.errors()], prefix)))


def _clauses(found: Sequence[tuple[_Place, Any]], prefix: str) -> Iterator[str]:
    expected: dict[tuple[str, str], list[str]] = {}
    for place, e in found:
        path = (prefix + ".".join(place.names)).rstrip(".")  # of a check of the whole there is no name
        last, got = (place.names or [""])[-1], quoted(e["input"])
        if e["type"] == "extra_forbidden" and path in SHORT:
            yield f"unknown parameter {path!r}: its dotted name is {SHORT[path]}"
        elif e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            yield f"unknown parameter {path!r}{_known(path, last, place.beside)}"
        elif e["type"] == UNKNOWN:
            yield f"unknown parameter {path!r}{_of_its_name(path, last, e['ctx'])}"
        elif e["msg"] == "Input should be an object":
            yield f"{path} is a section, got {got}: {_how_to_set(path, place)}"
        elif e["type"] == COMPLETE:
            yield f"{path}: {e['msg']}"
        elif e["type"] == "value_error":  # raised by a check of this project
            said = str(e["ctx"]["error"])
            if not path or said.startswith(f"{path}."):
                yield said
            elif isinstance(e["input"], Mapping):  # a section, or an entry of one
                yield f"{path}: {said}"
            else:
                yield f"{path}: {said}, got {got}"
        elif not any(each.names[: len(place.names)] == place.names != each.names for each, _ in found):
            # Nothing inside of it is wrong. Each kind of value that it may be says what it expects.
            expected.setdefault((path, got), []).append(_expectation(e))
    for (path, got), (first, *others) in expected.items():
        said = f"{path}: {first}" if path else first
        yield f"{', or '.join([said, *(each.removeprefix(EXPECTED) for each in others)])}, got {got}"


def _expectation(e: Any) -> str:
    """What pydantic says it expected. A list is not called an array, and a lone value is shown as a list of it."""
    said = f"{e['msg'][:1].lower()}{e['msg'][1:]}"
    if e["type"] not in ("list_type", "tuple_type"):
        return said
    value = str(e["input"])
    return f"{EXPECTED}a list" + (f", such as [{value}]" if re.fullmatch(r"[\w.:-]+", value) else "")


def quoted(value: Any) -> str:
    """Its repr for an error: without passwords, and cut after two hundred characters."""
    text = masked(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _known(path: str, last: str, names: Sequence[str]) -> str:
    """Ends a clause on an unknown parameter."""
    near = did_you_mean(last, names)
    if near or not path.startswith(SEARCHED):
        return near or nearest(last, names)
    return f"{nearest(last, names)}; a dotted name is one key: tune.space={{training.lr: {{low: 0.01, high: 0.1}}}}"


def _of_its_name(path: str, last: str, about: Mapping[str, Any]) -> str:
    """The same where the `name` of the section decides what there is, and another one may have it."""
    section = path.rpartition(".")[0]
    hint = nearest(last, about["known"]) if about["known"] else f": {section}.name={about['name']} has no options"
    return f"{hint}; {section}.name={' or '.join(about['others'])} has it" if about["others"] else hint


def _how_to_set(path: str, place: _Place) -> str:
    """What to do where a section is expected."""
    if path in SHORT:
        return f"set a parameter in it, e.g. {SHORT[path]}"
    if place.in_a_value:
        inner = f" with some of {', '.join(place.inside)}" if place.inside else ""
        return f"give a mapping{inner}"
    return f"set a parameter in it, e.g. {path}.{next(iter(place.inside), 'name')}"


@dataclass(frozen=True)
class _Place:
    """A place in a configuration."""

    names: list[str]
    """The parts of its dotted name."""
    beside: list[str]
    """The parameters of the section that it is in."""
    inside: list[str]
    """The parameters of the section that it is."""
    in_a_value: bool
    """Whether it is in a list, or is a mapping with keys of the user's choice, or in one: it is given as a whole."""

    @classmethod
    def of(cls, root: Any, location: Sequence[Any]) -> _Place:
        """From what pydantic calls it."""
        kinds, names, beside, in_a_value = [root], list[str](), list[str](), False
        parts = iter(location)
        for part in parts:
            if len(kinds) > 1:  # pydantic says which of these kinds it tried, by a name of its own
                part = next(parts, None)
                if part is None:
                    break
            names.append(str(part))
            beside = _fields(kinds)
            kinds = next(filter(None, (_kinds(_inner(kind, part)) for kind in kinds)), [])
            in_a_value |= isinstance(part, int) or any(_value_of(kind) not in (None, Any) for kind in kinds)
        return cls(names, beside, _fields(kinds), in_a_value)


def _inner(kind: Any, part: Any) -> Any:
    """The type of what is at a name or a position in a value of a type; None: not known."""
    if isinstance(part, int):
        items = get_args(kind)
        return items[part] if part < len(items) and Ellipsis not in items else next(iter(items), None)
    if not _is_section(kind):
        return _value_of(kind)
    try:
        return get_type_hints(kind).get(part)
    except NameError:  # of somebody else's class
        return None


def _value_of(kind: Any) -> Any:
    """The type of a mapping's values; None: it is no mapping."""
    return get_args(kind)[1] if get_origin(kind) in (dict, Mapping) else None


def _kinds(kind: Any) -> list[Any]:
    """The types that a value of a type may have; none: not known."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [each for member in get_args(kind) for each in _kinds(member)]
    return [] if kind in (None, NoneType) else [kind]


def _is_section(kind: Any) -> bool:
    return is_model(kind) or (isinstance(kind, type) and is_dataclass(kind))


def _fields(kinds: Sequence[Any]) -> list[str]:
    section = next(filter(_is_section, kinds), None)
    if section is None:
        return []
    return [field.name for field in fields(section)] if is_dataclass(section) else list(section.model_fields)

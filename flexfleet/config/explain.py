"""Explains to a person what is wrong with a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from fl_engine.core.errors import masked, nearest
from fl_engine.core.fields import is_model
from fl_engine.core.registry import COMPLETE, UNKNOWN
from flexfleet.config.form_fields import SHORT

EXPECTED = "input should be "
"""How most of pydantic's messages begin."""


def explain(error: ValidationError, root: Any, prefix: str = "") -> str:
    """Return one clause for each thing that is wrong, by its dotted name below `prefix`."""
    return "; ".join(dict.fromkeys(_clauses([(*_place(root, e["loc"]), e) for e in error.errors()], prefix)))


def _clauses(found: Sequence[tuple[list[str], list[str], Any]], prefix: str) -> Iterator[str]:
    expected: dict[tuple[str, str], list[str]] = {}
    for names, beside, e in found:
        path = (prefix + ".".join(names)).rstrip(".")  # empty for a check of the whole
        last, got = (names or [""])[-1], quoted(e["input"])
        if e["type"] == "extra_forbidden" and path in SHORT:
            yield f"unknown parameter {path!r}: its dotted name is {SHORT[path]}"
        elif e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            yield f"unknown parameter {path!r}{nearest(last, beside)}"
        elif e["type"] == UNKNOWN:
            yield f"unknown parameter {path!r}{_of_its_name(path, last, e['ctx'])}"
        elif e["msg"] == "Input should be an object":
            inner = SHORT.get(path, f"{path}.<name>")
            yield f"{path} is a section, got {got}: set a parameter in it, e.g. {inner}"
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
        elif not any(other[: len(names)] == names != other for other, _, _ in found):
            # Nothing inside of it is wrong. Each kind of value that it may be says what it expects.
            expected.setdefault((path, got), []).append(_expectation(e))
    for (path, got), (first, *others) in expected.items():
        said = f"{path}: {first}" if path else first
        yield f"{', or '.join([said, *(each.removeprefix(EXPECTED) for each in others)])}, got {got}"


def _expectation(e: Any) -> str:
    """Return what pydantic expected. A list is not called an array, and a single value is shown as a list of it."""
    said = f"{e['msg'][:1].lower()}{e['msg'][1:]}"
    if e["type"] not in ("list_type", "tuple_type"):
        return said
    value = str(e["input"])
    return f"{EXPECTED}a list" + (f", such as [{value}]" if re.fullmatch(r"[\w.:-]+", value) else "")


def quoted(value: Any) -> str:
    """Return the repr of a value for an error, without passwords and at most two hundred characters long."""
    text = masked(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _of_its_name(path: str, last: str, about: Mapping[str, Any]) -> str:
    """End a clause on an option that the `name` of its section does not have."""
    section = path.rpartition(".")[0]
    hint = nearest(last, about["known"]) if about["known"] else f": {section}.name={about['name']} has no options"
    return f"{hint}; {section}.name={' or '.join(about['others'])} has it" if about["others"] else hint


def _place(root: Any, location: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return the parts of the dotted name of pydantic's location, and the parameters beside the last one."""
    kinds, names, beside = [root], list[str](), list[str]()
    parts = iter(location)
    for part in parts:
        if len(kinds) > 1:  # pydantic says which of these kinds it tried, by a name of its own
            part = next(parts, None)
            if part is None:
                break
        names.append(str(part))
        beside = next((_fields(kind) for kind in kinds if _is_section(kind)), [])
        kinds = next(filter(None, (_kinds(_inner(kind, part)) for kind in kinds)), [])
    return names, beside


def _inner(kind: Any, part: Any) -> Any:
    """Return the type of what is at a name or a position in a value of a type; None: not known."""
    if isinstance(part, int):
        items = get_args(kind)
        return items[part] if part < len(items) and Ellipsis not in items else next(iter(items), None)
    if not _is_section(kind):
        return get_args(kind)[1] if get_origin(kind) in (dict, Mapping) else None
    try:
        return get_type_hints(kind).get(part)
    except NameError:  # of a user's own class
        return None


def _kinds(kind: Any) -> list[Any]:
    """Return the types that a value of a type may have; none: not known."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [each for member in get_args(kind) for each in _kinds(member)]
    return [] if kind in (None, NoneType) else [kind]


def _is_section(kind: Any) -> bool:
    return is_model(kind) or (isinstance(kind, type) and is_dataclass(kind))


def _fields(section: Any) -> list[str]:
    return [field.name for field in fields(section)] if is_dataclass(section) else list(section.model_fields)

"""Explains to a person what is wrong with a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from fl_engine.core.errors import masked, nearest
from fl_engine.core.registry import COMPLETE, UNKNOWN
from flexfleet.config.short import SHORT


def explain(error: ValidationError, root: Any, prefix: str = "") -> str:
    """One clause for each thing that is wrong, by its dotted name below `prefix`."""
    lines = []
    for e in error.errors():
        *parents, last = e["loc"] or ("",)
        names, known = _walk(root, parents)
        path = (prefix + ".".join([*names, str(last)])).rstrip(".")  # of a check of the whole there is no name
        if e["type"] == "extra_forbidden" and path in SHORT:
            lines.append(f"unknown parameter {path!r}: its dotted name is {SHORT[path]}")
        elif e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"unknown parameter {path!r}{nearest(str(last), known)}")
        elif e["type"] == UNKNOWN:
            lines.append(f"unknown parameter {path!r}{nearest(str(last), e['ctx']['known'])}")
        elif e["msg"] == "Input should be an object":
            inner = SHORT.get(path) or f"{path}.{next(iter(_walk(root, e['loc'])[1]), 'name')}"
            lines.append(f"{path} is a section, got {short(e['input'])}: set a parameter in it, e.g. {inner}")
        elif e["type"] == COMPLETE:
            lines.append(f"{path}: {e['msg']}")
        elif e["type"] == "value_error":  # raised by a check of this project
            said = str(e["ctx"]["error"])
            if not path or said.startswith(f"{path}."):
                lines.append(said)
            elif isinstance(e["input"], Mapping):  # a section, or an entry of one
                lines.append(f"{path}: {said}")
            else:
                lines.append(f"{path}: {said}, got {short(e['input'])}")
        else:
            lines.append(f"{path}: {e['msg'][:1].lower()}{e['msg'][1:]}, got {short(e['input'])}")
    return "; ".join(dict.fromkeys(lines))


def short(value: Any) -> str:
    text = masked(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _walk(root: Any, location: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The dotted name of a place in a configuration, and the parameters that exist there."""
    here, names = root, []
    for part in location:
        names.append(str(part))
        if isinstance(part, int):
            here = next((m for m in get_args(here) if is_dataclass(m)), None)
        elif isinstance(here, type) and (is_dataclass(here) or issubclass(here, BaseModel)):
            here = get_type_hints(here).get(str(part))
        else:
            here = None
        if get_origin(here) is Annotated:
            here = get_args(here)[0]
    if is_dataclass(here):
        return names, [f.name for f in fields(here)]
    return names, list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []

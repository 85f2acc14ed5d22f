"""Whether an answer of Kubeflow's API has the shape that its published models say. The SDK does not look: it makes a
text of whatever stands where an id should."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from fl_engine.core.errors import kind_of, masked, printable

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""An id of a thing on the server: a UUID, so far."""


def misfit(value: Any, kind: str, where: str = "") -> str:
    """The first place in a value of JSON that is not of the kind, and what stands there; empty: it fits. `kind`: a type
    as `kfp_server_api` writes it. A field that is missing or null fits, as does one that the model does not have."""
    import kfp_server_api

    if value is None or kind == "object":
        return ""
    if kind.startswith(("list[", "dict(")):
        inner = kind[5:-1] if kind.startswith("list[") else kind[5:-1].partition(", ")[2]
        if not isinstance(value, list if kind.startswith("list[") else dict):
            return _odd(value, where)
        items = enumerate(value) if isinstance(value, list) else value.items()
        places = ((f"{where}[{key}]", each) for key, each in items)
        absent = () if inner == "object" else (None,)
        found = (_odd(each, place) if each in absent else misfit(each, inner, place) for place, each in places)
        return next(filter(None, found), "")
    fields = getattr(getattr(kfp_server_api, kind, None), "openapi_types", None)
    if not fields:  # a plain type, or an enumeration, which is a text
        return "" if _plain(value, kind, where) else _odd(value, where)
    if not isinstance(value, dict):
        return _odd(value, where)
    names = getattr(kfp_server_api, kind).attribute_map
    inside = ((names[field], of) for field, of in fields.items())
    found = (misfit(value.get(name), of, f"{where}.{name}".lstrip(".")) for name, of in inside)
    return next(filter(None, found), "")


def _plain(value: Any, kind: str, where: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "datetime":
        try:
            return datetime.fromisoformat(value).tzinfo is not None
        except (TypeError, ValueError):
            return False
    whole = isinstance(value, int) and not isinstance(value, bool) and not where.endswith("_id")
    return isinstance(value, str) or whole  # numbers of 64 bits are texts in JSON, though not for every proxy


def _odd(value: Any, where: str) -> str:
    text = kind_of(value) if isinstance(value, list | dict) else json.dumps(value)
    return printable(f"{where[:80] or 'it'} is {masked(text)[:80]}")

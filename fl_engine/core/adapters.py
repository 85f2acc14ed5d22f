"""What pydantic reads and writes each kind of value with. Making it takes milliseconds, so it is made once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter

MOST_KINDS = 512
"""Classes that are defined again and again, as in a notebook, are forgotten in time."""
_adapter = lru_cache(MOST_KINDS)(TypeAdapter)
_hints = lru_cache(MOST_KINDS)(get_type_hints)


def adapter(kind: Any) -> TypeAdapter[Any]:
    """`pydantic.TypeAdapter` of a class or annotation."""
    return _adapter(kind)


def hints(kind: Any) -> dict[str, Any]:
    """`typing.get_type_hints` of a class; not to be changed."""
    return _hints(kind)

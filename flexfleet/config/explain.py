"""Convert pydantic's errors about a configuration to messages that contain the dotted names of parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from fl_engine.core.errors import ConfigError, FlexfleetError, masked, nearest, together
from fl_engine.core.registry import COMPLETE, UNKNOWN
from flexfleet.config.dotted import SHORT, leaves, locate

EXPECTED = "input should be "
"""Text with which most pydantic messages begin, in lower case."""

CODE = {"literal_error": "config.unknown", "missing": "config.missing"}
"""Map pydantic's error types to codes. All other error types have the code `wrong_type` or `out_of_range`."""
RANGES = ("greater_than", "less_than", "multiple_of", "too_", "finite_number")


def config_error(error: ValidationError, values: Any, known: Mapping[str, Any], prefix: str = "") -> FlexfleetError:
    """Combine all of pydantic's errors into one error that contains the dotted name of each invalid parameter.

    Args:
        error: Pydantic's error.
        values: The validated values.
        known: Nested mappings and lists with all known parameters, for suggestions of similar names.
        prefix: Dotted name of the section that was validated, followed by a dot.
    """
    found = [(*_place(values, known, each), each) for each in error.errors()]
    expected: dict[tuple[str, str], list[Any]] = {}
    wrong = []
    for names, beside, each in found:
        path = (prefix + ".".join(names)).rstrip(".")  # `path` is empty if the error concerns the whole configuration
        kind, got = each["type"], quoted(each["input"])
        if kind == "value_error" or kind == COMPLETE:
            wrong.append(_own_error(path, each, got))
        elif message := _unknown(path, beside, known, each, got):
            wrong.append(ConfigError(message, code="config.unknown", path=path))
        elif not any(other[: len(names)] == names != other for other, _, _ in found):
            # The value as a whole is invalid. For a union, pydantic reports one error for each type, so collect them.
            expected.setdefault((path, got), []).append(each)
    for (path, got), (first, *others) in expected.items():
        rest = [_expectation(each).removeprefix(EXPECTED) for each in others]
        message = ", or ".join([f"{path}: {_expectation(first)}" if path else _expectation(first), *rest])
        kind = first["type"]
        code = CODE.get(kind, "config.out_of_range" if any(part in kind for part in RANGES) else "config.wrong_type")
        wrong.append(ConfigError(f"{message}, got {got}", code=code, path=path or None))
    return together(wrong)


def _own_error(path: str, error: Any, got: str) -> ConfigError:
    """Convert an error from one of flexfleet's own checks to a ConfigError. If the message begins with the name of a
    parameter in the section, the code is `conflict` and the path is this parameter."""
    text = error["msg"] if error["type"] == COMPLETE else str(error["ctx"]["error"])
    word = re.match(r"[\w.]*", text)[0]  # type: ignore[index]
    if "." in word and word.startswith(f"{path}." if path else ""):
        return ConfigError(text, code="config.conflict", path=word)
    if not path:
        return ConfigError(text)
    is_section = isinstance(error["input"], Mapping) or error["type"] == COMPLETE
    return ConfigError(f"{path}: {text}" if is_section else f"{path}: {text}, got {got}", path=path)


def _unknown(path: str, beside: Sequence[str], known: Mapping[str, Any], error: Any, got: str) -> str:
    """Return the message for an unknown parameter, or for a section that is not a mapping; "" for other errors."""
    kind, last = error["type"], path.rpartition(".")[2]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        dotted = locate(path, known)
        hint = f" (did you mean {dotted!r}?)" if dotted else nearest(last, beside) if beside else ""
        return f"unknown parameter {path!r}" + (f": its dotted name is {SHORT[path]}" if path in SHORT else hint)
    if kind == UNKNOWN:
        return f"unknown parameter {path!r}{nearest(last, error['ctx']['known'])}"
    if error["msg"] == "Input should be an object":
        inside = (each for each in leaves(known) if each.startswith(f"{path}."))
        inner = SHORT.get(path) or next(inside, f"{path}.<name>")
        return f"{path} is a section, got {got}. Set a parameter in it, e.g. {inner}"
    return ""


def _expectation(e: Any) -> str:
    """Return what pydantic expected. A tuple is called a list, as in YAML."""
    if e["type"] not in ("list_type", "tuple_type"):
        return f"{e['msg'][:1].lower()}{e['msg'][1:]}"
    value = str(e["input"])
    return f"{EXPECTED}a list" + (f", such as [{value}]" if re.fullmatch(r"[\w.:-]+", value) else "")


def quoted(value: Any) -> str:
    """Return the repr of a value, shortened to about 200 characters. Passwords are masked."""
    text = masked(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _place(values: Any, known: Any, error: Any) -> tuple[list[str], list[str]]:
    """Return the parts of the invalid parameter's dotted name, and the known parameters at the same level."""
    names, beside = list[str](), list[str]()
    for i, part in enumerate(error["loc"]):
        is_item = isinstance(values, list | tuple) and isinstance(part, int)
        is_missing = error["type"] in ("missing", COMPLETE) and i == len(error["loc"]) - 1
        if is_item or is_missing or (isinstance(values, Mapping) and part in values):  # else a union's member
            names.append(str(part))
            values = None if is_missing else values[part]
            beside = list(known) if isinstance(known, Mapping) else []
            if isinstance(known, Mapping):
                known = known.get(str(part))
            elif isinstance(known, list):
                known = known[0] if known else None
    return names, beside

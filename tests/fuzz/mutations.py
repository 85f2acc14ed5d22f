"""Bad input by the thousand: a valid file with one thing wrong, and bytes that were never one.

A reader has one law: what comes out is valid, or a named error (fl_engine/core/errors.py) that says where. Nothing else
is raised, nothing takes long, and nothing declared to be huge is believed.

FLEXFLEET_FUZZ=<cases per test> is a campaign, of other cases each time; without it a few, always the same.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fl_engine.core.errors import FlexfleetError

T = TypeVar("T")
Path = tuple[str | int, ...]
"""Path of a value in nested lists and mappings."""

CASES = int(os.environ.get("FLEXFLEET_FUZZ") or 0)
LONG_S = 30.0
"""Seconds after which a reader of a file of some kilobytes counts as hanging."""


def law(few: int) -> settings:
    """Return settings with `few` cases, unless FLEXFLEET_FUZZ sets another number."""
    return settings(
        max_examples=CASES or few,
        derandomize=not CASES,
        database=None,
        print_blob=bool(CASES),
        suppress_health_check=list(HealthCheck),
    )


class Hangs(BaseException):
    """Raised if a reader hangs. Readers must not catch it."""


@contextmanager
def in_time(seconds: float = LONG_S) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Hangs(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Kinds = type[FlexfleetError] | tuple[type[FlexfleetError], ...]


def answer(read: Callable[[], T], *names: str, kind: Kinds = FlexfleetError) -> T | None:
    """Return the result of a reader, or None if it raises an error of this `kind` that contains one of `names`."""
    try:
        with in_time():
            return read()
    except kind as error:
        said = str(error)
        assert any(name in said for name in names), f"says neither of {names}: {said[:300]}"
        assert len(said) < 20_000, f"an error of {len(said)} characters: {said[:300]}"
        return None


@st.composite
def damaged(draw: Any, valid: bytes) -> bytes:
    """Draw a copy with flipped, lost, repeated or inserted bytes, a truncated copy, or random bytes."""
    out = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(out)))
        match draw(st.sampled_from(("flip", "cut", "lose", "repeat", "insert", "number", "any"))):
            case "flip" if at < len(out):
                out[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del out[at:]
            case "lose":
                del out[at : at + draw(st.integers(1, 64))]
            case "repeat":
                out[at:at] = out[max(0, at - draw(st.integers(1, 64))) : at]
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "number":  # a size or an offset, in the byte order of most formats
                out[at : at + 8] = draw(st.sampled_from((2**63 - 1, 2**64 - 1, 2**40, 2**31, 0))).to_bytes(8, "little")
            case "any":
                out = bytearray(draw(st.binary(max_size=200)))
    return bytes(out)


def nested(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5, 1e-300, 1e300, -1e300,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "1", "0.5", "nan", "null", "..", "../../x", "a/b", "/",
    "a b", "\u00e9\u4e2d", "\u0000", "~nobody-of-this-name", "x" * 5000, "{0}", "%s", "s3://", "://", "http://[",
    [], [[]], [1, 2, 3], [-1], [0.5], ["x"], [None], [True], {}, {"": 0}, {"name": "x"}, {"keep": 1}, nested(30),
)  # fmt: skip
"""Values to put in place of valid ones."""

anything = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def places(value: Any, path: Path = ()) -> list[Path]:
    """Return the paths of all values, the whole first; of a long list only the first two and the last element."""
    found = [path]
    if isinstance(value, dict):
        found += [place for key, inner in value.items() for place in places(inner, (*path, key))]
    elif isinstance(value, list):
        for i in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            found += places(value[i], (*path, i))
    return found[:500]


@st.composite
def altered(draw: Any, valid: Any) -> Any:
    """Draw a copy in which one or two values are lost, doubled, renamed, exchanged or replaced."""
    out = json.loads(json.dumps(valid))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
        *parents, last = draw(st.sampled_from(places(out))) or (None,)
        if last is None:
            return deepcopy(draw(anything))
        here = out
        for part in parents:
            here = here[part]
        how = draw(st.sampled_from(("odd", "odd", "odd", "lose", "double", "rename", "exchange")))
        if how == "odd":
            here[last] = deepcopy(draw(anything))
        elif how == "lose":
            del here[last]
        elif how == "double" and isinstance(here, list):
            here.insert(last, here[last])
        elif how == "rename" and isinstance(here, dict):
            here[draw(st.sampled_from(("x", "", f"{last} ", str(last).upper())))] = here.pop(last)
        elif how == "exchange":
            other = draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
            here[last], here[other] = here[other], here[last]
    return out


ODD_JSON: tuple[bytes, ...] = (
    b"", b"null", b"[]", b"{}", b"0", b'"x"', b"nan", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}", b"{" + b'"a":1,' * 3 + b"}", b"1" * 10_000, b"1e999", b'{"schema_version":1}', b"\x00" * 100,
    b'{"schema_version":1,"schema_version":2}', b"\x80\x04K\x01.", b"{'a': 1}", b"// no\n{}",
)  # fmt: skip
"""Contents that are not valid files."""


ODD_TOKENS = (
    b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 5000, b"[" * 3000 + b"]" * 3000, b"1.5", b"-0", b"01", b"1_0",
)  # fmt: skip


@st.composite
def json_like(draw: Any, valid: Any) -> bytes:
    """Draw a JSON file with wrong values, damaged bytes or other content."""
    text = json.dumps(valid).encode()
    how = draw(st.sampled_from(("values", "values", "values", "bytes", "token", "double key", "odd", "coding")))
    if how == "values":
        return json.dumps(draw(altered(valid))).encode()
    if how == "bytes":
        return draw(damaged(text))
    if how == "token":  # in place of a number
        digits = [i for i in range(len(text)) if text[i : i + 1].isdigit()] or [0]
        at = draw(st.sampled_from(digits))
        return text[:at] + draw(st.sampled_from(ODD_TOKENS)) + text[at + 1 :]
    if how == "double key" and isinstance(valid, dict) and valid:
        key = draw(st.sampled_from(sorted(valid)))
        return text[:-1] + b", " + json.dumps({key: draw(anything)}).encode()[1:]
    if how == "coding":
        return text.decode().encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig", "utf-7"))))
    return draw(st.sampled_from(ODD_JSON))


def texts(*, odd: Sequence[str]) -> SearchStrategy[str]:
    """Draw words of a command line: these, or any text or undecodable bytes."""
    word = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
    bytes_ = st.binary(max_size=6).map(lambda value: os.fsdecode(value.replace(b"\0", b"")))
    return st.sampled_from(tuple(odd)) | word | bytes_

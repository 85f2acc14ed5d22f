"""Which tests `make test` runs: of products of algorithms and kinds, each algorithm and each kind. None is timed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from hypothesis import settings

from tests.harness.selected import PRODUCTS, TESTS, Seen, is_off_the_diagonal


def test_of_a_product_each_value_of_each_argument_is_there() -> None:
    name, every, seen = "test_other_samples_and_tasks_learn_and_go_on", 5, Seen()
    assert PRODUCTS[name] == every
    cases = [{"algorithm": algorithm, "kind": kind} for algorithm, kind in itertools.product("abcdef", range(5))]
    items = [SimpleNamespace(originalname=name, parent="a", callspec=SimpleNamespace(params=case)) for case in cases]
    short = [item.callspec.params for item in items if not is_off_the_diagonal(item, seen)]
    assert len(short) == len(cases) // every
    assert {case["algorithm"] for case in short} == set("abcdef") and {case["kind"] for case in short} == set(range(5))


def test_the_products_are_tests() -> None:
    files = [*TESTS.rglob("test_*.py"), *(TESTS.parent / "fl_engine" / "testing").glob("*.py")]
    text = "\n".join(file.read_text("utf-8") for file in files)
    assert [name for name in PRODUCTS if f"def {name}(" not in text] == []


def test_no_law_is_timed() -> None:
    """On a busy machine it would fail."""
    assert settings().deadline is None

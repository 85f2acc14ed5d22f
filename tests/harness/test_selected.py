"""Which tests `make test` runs: of products of algorithms and kinds, each algorithm and each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.backends import BackendSuite
from tests.harness.selected import PRODUCTS, Seen, is_off_the_diagonal


class Collected:
    """Collects the tests of a file, and runs none."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def test_of_a_product_each_value_of_each_argument_is_there(tmp_path: Path) -> None:
    """With an argument of the test and one of a fixture, which pytest counts otherwise."""
    name, every = "test_other_samples_and_tasks_learn_and_go_on", 3
    assert PRODUCTS[name] == every
    (tmp_path / "pytest.ini").write_text("[pytest]")
    file = tmp_path / "test_product.py"
    file.write_text(
        "import pytest\n"
        "@pytest.fixture(params='abcdef')\n"
        "def algorithm(request): return request.param\n"
        "@pytest.mark.parametrize('kind', range(5))\n"
        f"def {name}(algorithm, kind): pass\n"
    )
    collected, seen = Collected(), Seen()
    pytest.main(["--collect-only", "-qqq", "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(file)],
                plugins=[collected])  # fmt: skip
    cases = [item.callspec.params for item in collected.items if not is_off_the_diagonal(item, seen)]  # type: ignore[attr-defined]
    assert len(collected.items) == 30 and len(cases) == 30 // every
    assert {case["algorithm"] for case in cases} == set("abcdef") and {case["kind"] for case in cases} == set(range(5))


def test_the_products_are_tests_of_the_suites() -> None:
    assert [name for name in PRODUCTS if not hasattr(AlgorithmSuite, name) and not hasattr(BackendSuite, name)] == []

"""Which tests `make test` runs and which are left to `make test-all`, and the order in which files begin."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FIRST = ("harness/test_kills.py", "docs", "pipelines", "flexfleet", "harness", "k8s", "s3")
"""What takes longest: it begins, so that at the end all processes have work. The kills wait, in one process, for half
as long as all else takes."""
LONG = {
    "benchmarks": ("contestants", "growth"),
    "docs": ("docs", "examples", "python"),
    "e2e": ("agents", "kill", "python310", "recipe", "wheel"),
    "flexfleet": (
        "dvc",
        "fedx",
        "kinds",
        "regress",
        "small_twins",
        "stop_simulated",
        "tracking",
        "tune",
        "tune_workers",
    ),
    "harness": ("attacks", "kills"),
    "k8s": ("alike", "backend", "lost", "secrets", "waiting"),
    "laws": ("limits",),
    "pipelines": ("compare_local", "nightly_local", "train_local", "tune_local"),
    "s3": ("dvc", "faulty", "probe", "s3"),
}
"""By folder, the files of which `make test-all` holds the tests: commands of the documentation, nights, pipelines of
real processes, kills, faults of a cluster, S3 servers."""


@functools.cache
def _is_long(file: Path) -> bool:
    """Whether all its tests are."""
    return file.stem.removeprefix("test_") in LONG.get(file.parent.name, ())


_files = [TESTS / folder / f"test_{name}.py" for folder, names in LONG.items() for name in names]
assert all(file.exists() for file in _files), f"LONG names {[file.name for file in _files if not file.exists()]}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares the seconds of importing files without a test that `-m` asks for."""
    asked, whole = config.option.markexpr, _is_long(collection_path)
    if asked not in ("long", "not long") or collection_path.suffix != ".py":
        return None
    if asked == "long":
        return None if whole or re.search(r"mark\.long|Suite\)", collection_path.read_text("utf-8")) else True
    return True if whole else None


LONG_IN_SUITES, QUICK_KINDS = "test_other_samples_and_tasks_learn_and_resume", ("next_token", "regression")
"""Test of `AlgorithmSuite` that is long, except for these kinds of samples. Suites of users have no marks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the long tests, and lets long files begin."""
    for item in items:
        is_slow_kind = LONG_IN_SUITES in item.name and not any(kind in item.name for kind in QUICK_KINDS)
        if _is_long(item.path) or is_slow_kind:
            item.add_marker("long")
    items.sort(key=lambda item: _place(item.path))


@functools.cache  # of 12,000 tests
def _place(file: Path) -> int:
    """The place in FIRST; for all others its length."""
    inside = file.relative_to(TESTS)
    return next((place for place, first in enumerate(FIRST) if inside.is_relative_to(first)), len(FIRST))

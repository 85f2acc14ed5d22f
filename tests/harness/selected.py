"""Which tests `make test` runs and which are left to `make test-all`, and the order in which files begin."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
FIRST = ("harness/test_kills.py", "docs", "pipelines", "flexfleet", "harness", "k8s", "s3")
"""What takes longest: it begins, so that at the end all processes have work. The kills wait, in one process, for half
as long as all else takes."""
LONG = {
    "benchmarks": ("contestants", "growth"),
    "docs": ("docs", "examples", "python", "python_compare"),
    "e2e": ("agents", "kill", "python310", "recipe", "wheel"),
    "flexfleet": (
        "dvc",
        "fedx",
        "init",
        "kinds",
        "regress",
        "small_twins",
        "stop_simulated",
        "tracking",
        "tune",
        "tune_workers",
    ),
    "harness": ("attacks", "kills"),
    "k8s": ("alike", "backend", "lost", "secrets", "suite", "waiting"),
    "laws": ("limits",),
    "pipelines": ("compare_local", "nightly_local", "platform_local", "train_local", "tune_local"),
    "s3": ("answers", "dvc", "faulty", "probe", "s3"),
}
"""By folder, the files of which `make test-all` holds the tests: commands of the documentation, nights, pipelines of
real processes, kills, faults of a cluster, S3 servers."""

PRODUCTS = {
    "test_a_device_that_cannot_fails_in_pruning": 3,
    "test_submit_reports_a_fault_of_a_call_in_one_line": 6,
    "test_a_kill_between_any_two_writes_changes_no_bit": 2,
    "test_lane_has_the_same_bits_with_any_neighbours": 2,
    "test_a_resumed_run_equals_one_that_was_not_stopped": 2,
    "test_a_run_that_is_killed_anywhere_merges_the_same": 2,
    "test_a_slice_runs_like_the_full_network_with_the_rest_zeroed": 2,
    "test_bad_clients_that_are_few_enough_cannot_leave_the_range_of_the_honest": 2,
    "test_encoded_weights_move_half_the_bytes_and_go_on": 2,
    "test_equal_bits_for_other_samples_and_tasks": 3,
    "test_equal_bits_to_one_order_after_the_other": 3,
    "test_every_network_has_each_precision": 2,
    "test_every_row_is_a_configuration": 3,
    "test_failures_are_outcomes_like_any_other": 3,
    "test_no_bit_moves": 3,
    "test_no_stream_is_longer_than_its_header_says": 2,
    "test_one_outcome_for_each_order": 3,
    "test_one_tensor_of_logits_for_each_output_kept": 2,
    "test_other_samples_and_tasks_learn_and_go_on": 5,
    "test_static_batch_norm_changes_the_scores_alone": 2,
    "test_static_batch_norm_takes_the_place_of_running_statistics": 2,
    "test_the_global_generator_neither_moves_nor_matters": 3,
    "test_the_plan_is_only_read": 3,
    "test_the_state_is_that_of_the_layout": 2,
    "test_two_rounds": 4,
    "test_two_rounds_with_every_aggregation": 4,
    "test_updates_that_agree_are_taken_as_they_are": 2,
    "test_what_a_round_refuses_is_refused_after_a_kill_as_before": 2,
    "test_whichever_operation_fails_the_run_stops_or_not_and_goes_on_to_the_same_bits": 3,
    "test_private_selection_follows_from_key_not_seed": 2,
    "test_with_a_buffer_of_all_it_is_the_synchronous_run": 2,
}
"""Tests of each algorithm (backend, network, call) with each kind of samples (devices, aggregation, fault): of so many
cases `make test` has one, on a diagonal, so that it has each algorithm and each kind; `make test-all` has the others.
Of a test with one argument `make test` has every second or third value, so that each algorithm and network still meets
most laws."""


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the long tests, and lets long files begin."""
    seen: Seen = {}
    for item in items:
        if _is_long(item.path) or is_off_the_diagonal(item, seen):
            item.add_marker("long")
    items.sort(key=lambda item: _place(item.path))


Seen = dict[tuple[Any, ...], list[Any]]
"""The values of each argument of a test, as they came."""


def is_off_the_diagonal(item: Any, seen: Seen) -> bool:
    """Counts values itself: pytest's own indices of an argument go on from one value of a fixture to the next."""
    name = getattr(item, "originalname", "")
    if name not in PRODUCTS or not hasattr(item, "callspec"):
        return False
    place = 0
    for argument, value in item.callspec.params.items():
        values = seen.setdefault((item.parent, name, argument), [])
        if value not in values:
            values.append(value)
        place += values.index(value)
    return place % PRODUCTS[name] > 0


@functools.cache  # of 12,000 tests
def _place(file: Path) -> int:
    """The place in FIRST; for all others its length."""
    inside = file.relative_to(TESTS)
    return next((place for place, first in enumerate(FIRST) if inside.is_relative_to(first)), len(FIRST))

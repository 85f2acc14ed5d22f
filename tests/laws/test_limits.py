"""What must not grow with clients, at sizes that take seconds (`benchmarks/limits.py` measures the large ones)."""

from __future__ import annotations

from benchmarks.limits import alone, of_clients, of_updates


def test_coordinator_memory_does_not_grow_with_updates() -> None:
    few, many = (alone(of_updates, count, "store", False)["mb"] for count in (4, 28))
    # How many are read ahead at once is a matter of timing: up to eight of 10 MB more or less.
    assert many < few + 120, "24 more updates of 10 MB"


def test_ten_thousand_clients_fit_into_memory() -> None:
    assert alone(of_clients, 10_000, 1000, 1)["mb"] < 1000

"""Runs that must have the same result: on every backend, and stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

WAYS: dict[str, Sequence[str]] = {
    "one": (),
    "threads": ("run.devices=[cpu, cpu]",),
    "processes": ("run.backend=processes", "run.devices=[cpu, cpu]"),
}


def run_of(flexfleet: Callable[..., Any], name: str, sets: Sequence[str], *argv: str) -> dict[str, Any]:
    """Return the result of runs/NAME."""
    done = flexfleet("run", "--json", "--run-id", name, *argv, sets=sets)
    assert done.code == 0, done.err
    result: dict[str, Any] = done.json
    return result


def alike(
    flexfleet: Callable[..., Any], sets: Sequence[str], ways: Mapping[str, Sequence[str]] = WAYS
) -> dict[str, dict[str, Any]]:
    """Return the results of runs/WAY, and of runs/again, which was stopped after the first round. Their models, bytes
    and waste are equal."""
    found = {name: run_of(flexfleet, name, [*sets, *more]) for name, more in ways.items()}
    run_of(flexfleet, "again", [*sets, "rounds.stop=1"])
    found["again"] = run_of(flexfleet, "again", sets, "--resume")
    for key in ("model_sha256", "bytes", "waste"):
        assert len({str(result[key]) for result in found.values()}) == 1, key
    return found

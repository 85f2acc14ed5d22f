"""A tracker that keeps what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Memory:
    """Keeps everything, for tests and notebooks."""

    def __init__(self) -> None:
        self.logged_params: dict[str, Any] = {}
        self.rows: dict[int, dict[str, float]] = {}
        self.status: str | None = None

    def params(self, values: Mapping[str, Any]) -> None:
        self.logged_params.update(values)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self.rows.update({step: dict(values) for step, values in rows})

    def finish(self, status: str) -> None:
        self.status = status

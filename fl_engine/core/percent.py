"""Which metrics are shares: people are shown them in %, in logs, tables and pages."""

from __future__ import annotations

PERCENT = ("accuracy", "accuracy_all", "top5")
"""By name, as in histories, where they are between 0 and 1."""

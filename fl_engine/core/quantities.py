"""Numbers as texts: plain ones, and amounts as Kubernetes writes them, 250m and 2 (CPUs), 512Mi and 1.5Gi (bytes)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)?|[eE]([+-]?[0-9]{1,2}))")
UNITS = {"": Decimal(1)} | {unit: Decimal(1000) ** n for n, unit in zip(range(-3, 0), "num", strict=True)}
UNITS |= {unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", 1)}


def quantity(text: str) -> Decimal:
    """The number that an amount stands for. Raises ValueError for other text."""
    found = NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"an amount as Kubernetes writes it is expected (250m, 2, 1Gi), got {text!r}")
    number, unit, exponent = found.groups()
    return Decimal(number) * UNITS[unit or ""] * Decimal(10) ** int(exponent or 0)


def need_plain(numbers: Iterable[str]) -> None:
    """Raises ValueError for a number with an underscore, or with digits of another script: Python reads 0_5 as 5."""
    if odd := next((number for number in numbers if "_" in number or not number.isascii()), None):
        raise ValueError(f"{odd[:100]!r}, which is no number")

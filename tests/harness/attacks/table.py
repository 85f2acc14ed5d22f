"""What an attack is, and how all of a table are tried."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

log = logging.getLogger("flexfleet.attacks")


@dataclass(frozen=True)
class Attack:
    name: str
    tries: str
    """What it is after, in words."""
    decided: Literal["server", "engine"]
    """Who has to refuse it."""
    run: Callable[..., str | None]
    """Tries it; what it got, or None where it was refused. Any exception counts as open: nothing was proven."""


@dataclass
class Tally:
    refused: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    not_enforced: list[str] = field(default_factory=list)
    """What a server that verifies nothing lets through, and only it could refuse."""

    def json(self) -> dict[str, Any]:
        tried = len(self.refused) + len(self.open)
        return {
            "tried": tried, "refused": len(self.refused), "open": self.open, "not_enforced": self.not_enforced
        }  # fmt: skip


def attempt(attack: Attack, *given: object) -> str | None:
    try:
        return attack.run(*given)
    except Exception as error:
        log.debug("%s", attack.name, exc_info=True)
        return f"could not be tried: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def try_all(attacks: Iterable[Attack], tally: Tally, *given: object, where: str = "", enforces: bool = True) -> None:
    """`enforces`: whether the server refuses anything by itself."""
    for attack in attacks:
        started = time.monotonic()
        got = attempt(attack, *given)
        name = f"{where}: {attack.name}" if where else attack.name
        said = "refused" if got is None else got
        log.info("%-7s %5.1f s  %s: %s", attack.decided, time.monotonic() - started, name, said)
        if attack.decided == "server" and not enforces:
            if got is not None:
                tally.not_enforced.append(f"{name}: {got}")
        elif got is None:
            tally.refused.append(name)
        else:
            tally.open.append(f"{name}: {got}")

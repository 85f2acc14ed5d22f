"""What an attack is, and how the attacks of a table are tried."""

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
    """What the attacker wants."""
    decided: Literal["server", "engine"]
    """Who has to refuse it."""
    run: Callable[..., str | None]
    """Tries it. Returns what it achieved, or None if it was refused. An exception counts as open: it proves nothing."""


@dataclass
class Tally:
    refused: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    not_enforced: list[str] = field(default_factory=list)
    """Attacks that only a server can refuse, and that a server without checks lets through."""

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
    """Tries each attack and adds it to the tally. `enforces`: whether the server checks signatures."""
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

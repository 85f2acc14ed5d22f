"""The section `agents` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from fl_engine.core.fields import Count, Moves, Positive, Section

URL_S = 604_800
"""Seconds: seven days, the most that S3 servers sign a URL for."""


class AgentsConfig(Section):
    """For run.backend=agents: devices that were invited (docs/guides/agents.md)."""

    lease_s: Positive = 60.0
    """Seconds of silence after which a device counts as gone, and its order goes to another one. It beats six times in
    it while it works."""
    deadline_s: Count = 3600
    """Seconds after which an order that is not answered goes to another device, whatever the first one says."""
    attempts: Count = 3
    """How many devices may fail an order before it counts as the client's failure."""
    wait_s: Positive = 600.0
    """Seconds to wait while no invited device takes an order; then the run stops, to be resumed."""
    endpoint: str | None = None
    """What devices call the S3 server, where that differs from AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: a client prunes to what its device has free, of its memory limit if it has one (docs/guides/agents.md);
    simulated: as the fleet says (equal bits)."""
    require_numerics: bool = False
    """A device that would compute other bits than the coordinator refuses to train."""

    @model_validator(mode="after")
    def _urls_live_as_long(self) -> AgentsConfig:
        if self.deadline_s + self.lease_s > URL_S:
            raise ValueError(
                f"agents.deadline_s + agents.lease_s is {self.deadline_s + self.lease_s:g} seconds, but the URLs that "
                f"devices get live for {URL_S} (seven days) at most: lower them"
            )
        return self

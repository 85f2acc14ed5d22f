"""The section `agents` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from fl_engine.core.fields import Count, Moves, Positive, Section

URL_S = 604_800
"""Seconds: seven days, the longest validity of a URL (AWS Signature Version 4)."""


class AgentsConfig(Section):
    """For run.backend=agents: enrolled devices (docs/guides/agents.md)."""

    lease_s: Positive = 60.0
    """Seconds of silence after which a device counts as gone and another one gets its assignment. A working device
    sends six heartbeats in this time."""
    deadline_s: Count = 3600
    """Seconds after which an assignment without a result goes to another device."""
    attempts: Count = 3
    """How many devices may fail an assignment before its client counts as failed."""
    wait_s: Positive = 600.0
    """Seconds to wait while no device takes an assignment. Then the run stops and can be resumed."""
    endpoint: str | None = None
    """Address of the S3 server as devices reach it, if it is not AWS_ENDPOINT_URL."""
    observe: Annotated[Literal["simulated", "cgroup"], Moves.RESULT] = "simulated"
    """cgroup: a client prunes to the memory that its device has free, or to the memory limit if there is one
    (docs/guides/agents.md); simulated: as the fleet says (equal bits)."""

    @model_validator(mode="after")
    def _urls_live_as_long(self) -> AgentsConfig:
        if self.deadline_s + self.lease_s > URL_S:
            raise ValueError(
                f"agents.deadline_s + agents.lease_s must be at most {URL_S} seconds (seven days), as long as devices' "
                f"URLs are valid; got {self.deadline_s + self.lease_s:g}"
            )
        return self

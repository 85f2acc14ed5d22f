"""Count the updates that a run did not merge, by client and reason."""

from __future__ import annotations

from collections import Counter, defaultdict

from fl_engine.core.fields import adapter
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.rounds.recorder import STAGES
from flexfleet.files.run_status import QUORUM, REASONS
from flexfleet.reports.finished_run import FinishedRun
from flexfleet.reports.page import NONE, Table

MOST = 20
"""Maximum number of clients that have a row of their own."""


def as_table(run: FinishedRun) -> Table | None:
    """Return a table of the clients with failed or rejected updates. Clients with the most such updates come first.
    Return None if all updates were merged, or if the run no longer has records of its clients."""
    codes: dict[int, Counter[str]] = defaultdict(Counter)
    asked = Counter[int]()
    for (client, code), count in run.history.results.items():
        asked[client] += count
        if code:
            codes[client][code] += count
    if not codes:
        return None
    order, tiers = sorted(codes, key=lambda client: (-codes[client].total(), client)), _tiers(run)
    # A single client fits into the last row, so do not replace it by a sum.
    shown, rest = (order, []) if len(order) <= MOST + 1 else (order[:MOST], order[MOST:])
    groups = [(str(client), tiers.get(client, NONE), [client]) for client in shown]
    groups += [(f"{len(rest)} more clients", NONE, rest)] if rest else []
    rows = []
    for name, tier, clients in groups:
        found = sum((codes[client] for client in clients), Counter[str]())
        reasons = ", ".join(f"{code}\N{NO-BREAK SPACE}{count}" for code, count in found.most_common())
        rows.append((name, tier, f"{found.total()} of {sum(asked[client] for client in clients)}", reasons))
    return Table("Updates that were not merged", ("client", "tier", "not merged", "reasons"), rows)


def meanings(run: FinishedRun) -> dict[str, str]:
    """Map the code of each failure in the run to its meaning. Codes without a longer text are omitted."""
    codes = sorted({code for _, code in run.history.results if code})
    stages = {str(stage): REASONS[metric] for stage, metric in STAGES.items()} | {"quorum": QUORUM}
    found = {code: stages.get(code) or REASONS.get(f"rejected/{code}", "") for code in codes}
    return {code: meaning for code, meaning in found.items() if meaning}


def _tiers(run: FinishedRun) -> dict[int, str]:
    """Map each client to the tier of its device; empty if the configuration of the run does not contain tiers."""
    if "fleet.tiers" not in run.config:
        return {}
    tiers = adapter(tuple[Tier, ...]).validate_python(run.config["fleet.tiers"])
    fleet = devices.fleet(tiers, run.config["partition.clients"], run.config["seed"])
    return {device.client: device.tier for device in fleet}

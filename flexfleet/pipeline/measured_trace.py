"""Write the measured times of a run's clients into a trace file (`fleet.trace`).

A client's speed and bandwidth change in each round in which the client was measured. A client that was lost in a round
is offline for the rest of this round. The times in the file are on the simulated clock of a run with this trace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fl_engine.core.clients import LEASE_S
from fl_engine.core.errors import ConfigError
from fl_engine.core.records import read_bytes
from fl_engine.fleet.devices import fleet
from fl_engine.remote.scheduler import LOST
from fl_engine.storage.store import FolderStore
from flexfleet import config as configs
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_folder import check_is_folder

LEAST, MOST = 1e-6, 1e9
"""Smallest and largest rate in a trace file."""


class Measured(NamedTuple):
    """A measured assignment. `seconds` includes the transfers if the coordinator has measured them."""

    seconds: float
    work: tuple[float, float]
    """Computed 10^9 multiply-adds, and transferred 10^6 bits."""
    rates: tuple[float, float]
    """Work per second of computing and of transferring."""

    @classmethod
    def of(cls, line: dict[str, Any], bandwidth: float) -> Measured:
        """Return the measurement in a client's line, whose simulated times were computed with `bandwidth` (bytes/s)."""
        work = line["macs"] / 1e9, line["seconds_communication"] * bandwidth * 8 / 1e6
        sending = line.get(LEASE_S, 0.0) - line["seconds"]
        rates = work[0] / line["seconds"], work[1] / sending if sending > 0 else MOST
        speed, sent = (min(max(rate, LEAST), MOST) for rate in rates)
        return cls(line["seconds"] + max(sending, 0.0), work, (speed, sent))

    def error(self, before: Measured) -> float:
        """Return the relative error of the time that the simulated clock computes with the rates of `before`."""
        return abs(sum(np.divide(self.work, before.rates)) / self.seconds - 1)


def trace(run: Path, out: Path) -> dict[str, Any]:
    """Write a trace file, and return a summary. Its `error` contains the median and the 90th percentile of the relative
    error of the simulated clock, if the time of each assignment is computed with the client's previous rates. Raises
    ConfigError if the run contains no measured times, and IntegrityError if the run has not finished."""
    check_is_folder(run)
    config = configs.parse_schema(RunFile.read(run / "run.json").config)
    rounds = json.loads(read_bytes(run / "history.json"))["rounds"]
    devices = fleet(config.fleet.tiers, config.partition.clients, config.seed)
    measured, begin = defaultdict[int, list[Measured]](list), 0.0
    # Map times to tuples (rates, or None if the rates do not change; whether the client is online), for each client.
    changes: list[dict[float, tuple[Any, bool]]] = [{0.0: (None, True)} for _ in devices]
    for row in rounds:
        lines = [line for line in row["clients"] if line.get("seconds") and line.get("macs")]
        found = {line["client"]: Measured.of(line, devices[line["client"]].bandwidth) for line in lines}
        end = begin + max((each.seconds for each in found.values()), default=row["metrics"].get("seconds_train", 0.0))
        for client, each in found.items():
            measured[client].append(each)
            changes[client][begin] = each.rates, True
        for client in (line["client"] for line in row["clients"] if line.get("code") == LOST):
            changes[client] |= {begin + (end - begin) / 100: (None, False), end: (None, True)}
        begin = end
    if not measured or config.fleet.trace is not None:
        raise ConfigError(
            f"{run} has no measured times of clients. Choose a run without fleet.trace in which they trained"
        )
    rows: list[tuple[Any, ...]] = [("client", "time", "compute", "bandwidth", "online")]
    for device, own in zip(devices, changes, strict=True):
        alike = [each for client in measured if devices[client].tier == device.tier for each in measured[client]]
        typical = np.median([each.rates for each in alike or chain(*measured.values())], axis=0).tolist()
        rates = measured[device.client][0].rates if device.client in measured else typical
        for time, (new, online) in sorted(own.items()):
            rates = new or rates
            rows.append((device.client, time, *rates, int(online)))
    FolderStore(out.parent).put(out.name, "".join(f"{','.join(map(str, row))}\n" for row in rows).encode())
    errors = [later.error(earlier) for each in measured.values() for earlier, later in pairwise(each)]
    median, p90 = np.percentile(errors, (50, 90)).tolist() if errors else (None, None)
    about = {"file": str(out), "clients": len(measured), "rounds": len(rounds)}
    return {**about, "error": {"median": median, "p90": p90}}

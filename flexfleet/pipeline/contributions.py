"""Measure how much each client or tier contributes to a run's model, by leaving it out (`flexfleet contributions`)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.storage.checkpoints import Checkpoints
from flexfleet import config as configs
from flexfleet.files.artifacts import RunFile, RunResult
from flexfleet.files.run_folder import check_is_folder
from flexfleet.pipeline.fork import clients_of, shared_rounds
from flexfleet.pipeline.resume import store_of

log = logging.getLogger("flexfleet")

By = Literal["client", "tier"]


@dataclass(frozen=True)
class Contribution:
    name: str
    """`client=7` or `tier=weak`."""
    clients: tuple[int, ...]
    rounds: int
    """Number of rounds that were run again."""
    avg: float
    """Final metric without the clients."""
    contribution: float
    """Final metric of the run, minus `avg`."""


@dataclass(frozen=True)
class Plan:
    avg: float
    groups: Mapping[str, tuple[int, ...]]
    rounds: Mapping[str, int]
    """Number of rounds to run again without each group; 0 if no round asked the group."""
    seconds: float
    """Mean duration of a round."""

    def cost(self, jobs: int) -> str:
        forks, rounds = sum(map(bool, self.rounds.values())), sum(self.rounds.values())
        minutes = rounds * self.seconds / jobs / 60
        return f"{forks} forks with {rounds} rounds, about {minutes:.1f} min with {jobs} jobs"


def plan(run: Path, by: By) -> Plan:
    """Return the groups of clients to leave out, and the cost. Clients that no round asked cost nothing."""
    check_is_folder(run)
    file, result = RunFile.read(run / "run.json"), RunResult.read(run / "result.json")
    config = configs.parse_schema(file.config)
    checkpoints = Checkpoints(store_of(config, file.run_id, run))
    rows, kept = checkpoints.rows(), checkpoints.with_state()
    groups: dict[str, tuple[int, ...]]
    if by == "client":
        groups = {f"client={client}": (client,) for client in range(config.partition.clients)}
    else:
        groups = {f"tier={tier.name}": tuple(clients_of([f"tier={tier.name}"], run)) for tier in config.fleet.tiers}
    rounds = {}
    for name, clients in groups.items():
        first = shared_rounds(kept, rows, clients)
        if first is not None and file.forked is not None and first < file.forked.round:
            base = file.forked.run_id
            raise ConfigError(f"{name} was in rounds shared with {base}. Measure the contributions to {base} instead")
        rounds[name] = 0 if first is None else len(rows) - first
    seconds = fmean(row.metrics["seconds_round"] for row in rows)
    return Plan(result.metrics["avg"], groups, rounds, seconds)


def contributions(run: Path, planned: Plan, jobs: int) -> list[Contribution]:
    """Run a fork without each group, `jobs` at a time, and return the contributions, the largest first. Forks of an
    interrupted call are resumed."""

    def leave_out(name: str) -> Contribution:
        again, avg = planned.rounds[name], planned.avg
        if again:
            run_id = f"{run.resolve().name}-without-{name.replace('=', '-')}"
            program = [sys.executable, "-m", "flexfleet", "fork", str(run), "--without", name, "--run-id", run_id]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([*program, "--resume", "--json", "-q"], capture_output=True, text=True, env=env)
            if done.returncode != 0:
                raise EnvironmentFailure(f"the fork without {name} failed: {done.stderr.strip()[-500:]}")
            avg = json.loads(done.stdout)["metrics"]["avg"]
            log.info("without %s: avg %.4f", name, avg)
        return Contribution(name, planned.groups[name], again, avg, planned.avg - avg)

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(leave_out, planned.groups))
    return sorted(found, key=lambda each: -each.contribution)

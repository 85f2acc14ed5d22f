"""Forecast a run from its first rounds, with clients that return the received weights without training.

Such a round is exact unless it depends on trained values, such as the losses from which Oort learns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fl_engine.aggregation import privacy
from fl_engine.backends import InProcess
from fl_engine.core.clients import client_metrics
from fl_engine.core.errors import ConfigError, Diverged, PoolError
from fl_engine.core.state import pack
from fl_engine.exchange import coding
from fl_engine.preparation.apoz import of_scores
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.round import Progress, run_round
from fl_engine.rounds.run import Run
from fl_engine.rounds.verify import NEVER, scratch_clients, without_evaluation
from fl_engine.selection.capacity import eligible, holds
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore, tensor_bytes
from fl_engine.training.numerics import SINGLE
from flexfleet.files.artifacts import Forecast
from flexfleet.pipeline import partition
from flexfleet.pipeline.check import first_round
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.profile import LevelProfile, profile

log = logging.getLogger("flexfleet")

PRICES = {"node_hour": "node_hours", "gb_up": "mb_up", "gb_down": "mb_down", "gb_month": "mb_store"}
"""Map each price to the figure that it multiplies. Prices per GB apply to 1,000 MB."""
UNITS = {"seconds": "s", "seconds_simulated": "s", "joules": "J", "node_hours": "h", "pods": "", "money": ""}
"""Units of figures; MB for all other figures."""
TIMES = ("seconds_simulated", "node_hours", "joules")
"""Figures that depend on the devices' speed."""
ROUND_MB, CLIENT_MB = 1.4e-3, 3.9e-4
"""Usual size of a round's metrics in the store, and of the metrics of each client."""
APOZ = (0.15, 0.85), (0.85, 0.15)
"""APoZ of the first and of the last layer. If late layers are pruned more than early layers, models of equal size train
longer. Measured scores are between these extremes."""
ALLOCATOR_MB = 20
"""Uncertainty of a process's memory, which depends on PyTorch's buffers and on the allocator."""
REJECTED = 0.02
"""Fraction of updates that may be rejected."""
MOST_MB = 100
"""Maximum size of a round's models if a starting run forecasts itself."""


def forecast(
    resolved: Resolved, probe: float = 0.0, prices: Mapping[str, float] | None = None, seconds: float = 5.0
) -> Forecast:
    """Forecast a run from its configuration, with the pool that `check` assumes. If `probe` is not 0, train for about
    `probe` seconds on this machine to measure real time and memory. Draw rounds for about `seconds` seconds. Raises
    FlexfleetError."""
    config, parts, made = resolved.config, partition.cut(resolved), resolved.algorithm.preparations
    numerics = partition.numerics_of(resolved) if probe else SINGLE
    found, measured = dict[str, np.ndarray](), tuple[LevelProfile, ...]()
    cases, given = (*APOZ, None) if "apoz" in made else (None,), None
    for ends in cases:
        prepared = {}
        if ends is not None:
            scores = np.linspace(*ends, len(resolved.family.prunable())).tolist()
            prepared = {"apoz": of_scores(resolved.family, scores)}
        try:
            run, start, _ = first_round(resolved, parts, prepared)
        except (ConfigError, PoolError):
            if ends is None:
                raise
            continue  # with these scores, no sub-models have the required sizes, or a tier cannot hold any
        given = given or partition.simulated(resolved, run.site)  # reads the clients' folders only once
        site = replace(run.site, data=given.data, partition=given.partition, held=given.held, numerics=numerics)
        run = replace(run, site=site)
        if probe and not measured:
            measured = profile(resolved, seconds=probe / len(run.site.pool), device=config.run.devices[0]).levels
        # The search of a supernet chooses levels and codecs. APoZ scores hardly change the sizes of levels.
        slack, limits = 1.0 if "supernet" in made else 0.05 if made else 0.0, (1000, seconds / len(cases))
        for name, (value, low, high) in _figures(run, start, config.run.kept_rounds, slack, *limits, measured).items():
            _, lowest, highest = found.get(name, (value, low, high))
            found[name] = np.array([value, min(low, lowest), max(high, highest)])
    pool, fleet = run.site.pool, run.site.fleet
    factors, allocator = np.array([1, 0.7, 1.5]), ALLOCATOR_MB * np.array([0, -1, 1])
    sizes = {level.name: level.peak_bytes / 1e6 for level in measured if level.peak_bytes is not None}
    peaks = _shown({name: np.maximum(0.0, mb * factors + allocator) for name, mb in sizes.items()})
    if prices:
        scales = {name: 1e-3 if name.startswith("gb") else 1.0 for name in prices}
        found["money"] = np.sum([price * scales[name] * found[PRICES[name]] for name, price in prices.items()], axis=0)
    tiers = []
    for tier in dict.fromkeys(device.tier for device in fleet):
        devices = [device for device in fleet if device.tier == tier]
        fits = [model.name for model in pool if holds(devices[0], model.share)]
        about = {"name": tier, "memory": devices[0].most, "clients": [device.client for device in devices]}
        tiers.append({**about, "levels": fits, "peak": peaks.get(fits[-1]) if fits else None})
    levels = tuple({"name": model.name, "size": 100 * model.share, "peak": peaks.get(model.name)} for model in pool)
    return Forecast(figures=_shown(found), levels=levels, tiers=tuple(tiers))


def of_started(run: Run, initial: Any, kept_rounds: float, out: Path) -> None:
    """Write the figures of a run that starts to `out`, unless the network is large or no forecast is possible. A user's
    own algorithm is not run for a forecast that nobody asked for, because it may have side effects."""
    built_in = type(run.algorithm).__module__.startswith("fl_engine.")
    if not built_in or tensor_bytes(initial.params) * run.at_once >= MOST_MB * 1e6:
        return
    with suppress(Exception):  # the run itself will report the error
        Forecast(figures=_shown(_figures(run, initial, kept_rounds, 0.0, 8, 0.5))).write(out / "forecast.json")


def settle(out: Path, ledger: Ledger) -> None:
    """Add the real figures of a run whose rounds have finished to its forecast."""
    if not (out / "forecast.json").exists():
        return
    found, rows = Forecast.read(out / "forecast.json"), [sums_of(row) for row in ledger.checkpoints.each_row()]
    real = {name: sum(row[name] for row in rows) for name in rows[0]}
    files = [file for name in ("rounds", "metrics", "states", "pending") for file in (out / name).rglob("*")]
    real |= {"mb_store": sum(file.stat().st_size for file in files if file.is_file()) / 1e6} if files else {}
    figures = {name: {**figure, "real": real.get(name)} for name, figure in found.figures.items()}
    found.model_copy(update={"figures": figures}).write(out / "forecast.json")


def draw(run: Run, initial: Any, most: int, seconds: float) -> tuple[list[Row], Progress]:
    """Execute the first rounds of a run with clients that do not train: at least two rounds, then at most `most`, for
    `seconds` of CPU time. Return the rows and the progress. `initial` is the algorithm's state before the first round.
    Raises ConfigError if no client comes online."""
    options = run.options.model_copy(update={"stop": NEVER, "stop_simulated_s": None})
    key = bytes(32) if privacy.is_private(run.algorithm) else None
    site = replace(run.site, idle=True)
    idle = without_evaluation(replace(run, site=site, options=options, noise_key=key))
    drawn, progress, end = list[Row](), Progress(initial), time.thread_time() + seconds
    quiet, log.disabled = log.disabled, True  # the run itself will log the failures
    try:
        with TemporaryDirectory() as folder, suppress(Diverged):  # after many rounds of FedNova
            clients = scratch_clients(idle, InProcess(site, run.devices), Ledger(FolderStore(Path(folder))))
            while len(drawn) < 2 or (len(drawn) < most and time.thread_time() < end):
                progress, row = run_round(idle, progress, len(drawn), clients)
                drawn.append(row)
                if run.options.over(len(drawn), progress.clock):
                    break
    finally:
        log.disabled = quiet
    if not drawn:
        raise Diverged("the model's first weights are too large to merge an update")
    return drawn, progress


def sums_of(row: Row) -> dict[str, float]:
    """Return the figures of one round."""
    return {
        **({"joules": row.metrics["joules"]} if "joules" in row.metrics else {}),
        "seconds_simulated": row.metrics.get("seconds_simulated", 0.0),
        "mb_down": row.metrics["bytes_down"] / 1e6,
        "mb_up": row.metrics["bytes_up"] / 1e6,
        "pods": float(len(row.clients)),
        "node_hours": sum(line.get("seconds_simulated", 0.0) for line in row.clients) / 3600,
    }


def total(values: Sequence[float], rounds: int, slack: float, slower: float = 1.0) -> np.ndarray:
    """Return the expected sum over `rounds` rounds, and the bounds of its prediction interval.

    Args:
        values: Values of the first rounds.
        slack: Additional error, as a fraction of the sum.
        slower: Largest value that may follow, as a multiple of the largest known value.
    """
    count, mean = len(values), np.mean(values)
    rest, value = rounds - count, np.sum(values) + (rounds - count) * mean
    errors = 2 + 8 / max(1, count - 1) ** 2  # about the t distribution's 95 % quantile
    spread = max(np.std([*values, max(values) * slower], ddof=1), 0.15 * mean)
    margin = errors * spread * np.sqrt(rest + rest**2 / count) + slack * value
    return np.array([value, max(0.0, value - margin), value + margin])


def _figures(
    run: Run,
    initial: Any,
    kept_rounds: float,
    slack: float,
    most: int,
    seconds: float,
    measured: Sequence[LevelProfile] = (),
) -> dict[str, np.ndarray]:
    """Return the figures of a run from rounds that are drawn (`draw`). `slack` is the uncertainty of the pool, as a
    fraction of the figures. `kept_rounds` is the number of rounds whose files are kept."""
    if not any(map(len, run.site.partition.clients)):
        message = "partition.folders must be set, because a forecast requires the clients' sample counts"
        raise ConfigError(message, path="partition.folders")
    options, (rows, progress) = run.options, draw(run, initial, most, seconds)
    sums = [sums_of(row) for row in rows]
    longest = (options.stop_simulated_s or np.inf) / max(1e-9, float(np.mean([s["seconds_simulated"] for s in sums])))
    rounds = options.end(row.metrics for row in rows) or int(np.ceil(min(options.stop, longest)))
    coded = run.codecs != coding.PLAIN or any(model.codecs is not None for model in run.site.pool)
    learns = bool(client_metrics(run.algorithm))  # from results that do not exist yet
    slack = max(slack, 0.3 if coded or learns else 0.0)
    slacks = {"mb_down": slack, "mb_up": max(slack, 0.6 if coded else REJECTED), "pods": 0.0}
    slacks |= dict.fromkeys(TIMES, 1.0 if learns else max(slack, REJECTED))
    # A client's state is sent from the client's second assignment on, so the traffic grows until all clients have one.
    state_mb, seen = coding.bytes_of(run.client_state) / 1e6, set[int]()
    for row, each in zip(rows, sums, strict=True):
        asked = {line["client"] for line in row.clients}
        each["mb_down"] -= state_mb * len(asked & seen)
        seen |= asked
    slowest = min(device.speed for device in eligible(run.algorithm, run.site.fleet, run.site.pool))
    asked_speed = min((device.speed for device in run.site.fleet if device.client in seen), default=slowest)
    slower = dict.fromkeys(TIMES, max(1.0, asked_speed / slowest))  # later rounds may ask the slowest devices
    found = {name: total([s[name] for s in sums], rounds, slacks[name], slower.get(name, 1.0)) for name in sums[0]}
    clients = len(run.site.fleet)
    known = clients * (1 - (1 - np.minimum(1.0, found["pods"] / rounds / clients)) ** rounds)
    found["mb_down"] += state_mb * (found["pods"] - known * [1, 1.1, 0.9])
    state = tensor_bytes(pack(progress.state)[0]) / 1e6 * np.array([1, 1, 1.2])
    kept = min(rounds, kept_rounds)
    text = (rounds * ROUND_MB + found["pods"] * CLIENT_MB) * [1, 0.5, 2]
    found["mb_store"] = np.maximum(kept, [2, 1, 2]) * state + known * state_mb * [1, 0.9, 1.2] + text
    found["mb_store"] += kept / rounds * found["mb_up"]
    if measured:
        found = {"seconds": total(_real_seconds(run, rows, measured), rounds, 0.0) * [1, 0.35, 2.2], **found}
    return found


def _real_seconds(run: Run, rows: Sequence[Row], measured: Sequence[LevelProfile]) -> list[float]:
    """Return the real seconds of each round, from the speeds that were `measured` on this machine."""
    lanes, data, reported = 1.0, run.site.data, [model for model in run.site.pool if model.reported]
    if run.site.numerics.strategy == "batched":  # a client alone trains as long as two clients together
        trained = [len({line.get("trained") for line in row.clients}) for row in rows]
        lanes = min(2.0, sum(len(row.clients) for row in rows) / max(1, sum(trained)))
    speeds = {m.name: (m.macs_per_sample or 0.0) * (m.samples_per_second or 0.0) for m in measured if m.fits}
    pace = {model.name: 1 / lanes / speeds.get(model.name, min(speeds.values())) for model in run.site.pool}
    tests = sum(m.macs * (len(data.test_y) + m.static_bn * len(data.train_y)) * pace[m.name] for m in reported)
    training = (sum(line["macs"] * pace[line["trained"]] for line in row.clients if "macs" in line) for row in rows)
    server = (row.metrics["seconds_round"] + tests / run.options.evaluate_every for row in rows)
    return [a + b / len(run.devices) for a, b in zip(server, training, strict=True)]


def _shown(found: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    bounds = {name: dict(zip(("value", "low", "high"), of.tolist(), strict=True)) for name, of in found.items()}
    return {name: {**of, "unit": UNITS.get(name, "MB")} for name, of in bounds.items()}

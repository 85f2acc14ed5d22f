"""The phases of a round: what each takes, and how many bits travel.

On the server's clock:

- `seconds_plan`: until it is fixed who is asked for what
- `seconds_encode`: the server encodes what it sends; 0 without a codec of the way down
- `seconds_train`: waiting for answers: clients train, and those in this process encode and the server decodes
- `seconds_merge`: until the new model is there, and what was measured of the clients
- `seconds_evaluate`: in rounds that are evaluated

They add up to `seconds_round`. Coding takes of `seconds_train`:

- `seconds_decode`: the server decodes updates; 0 without a codec of the way up
- `seconds_encode_clients`: merged clients' encoding, as they measure it; 0 without a codec of the way up. No
  part of `seconds_train` where clients train outside this process or side by side

On the simulated clock, of the client that finishes last among those that are merged: `simulated_compute` and
`simulated_communication`. With `simulated_wait` (a trace's, until somebody is online) they add up to
`seconds_simulated`, unless a deadline ends the round, or no update is merged. Encoding and decoding take no time there.
Asynchronous rounds overlap, and have neither.

What travels:

- `bits_down`, `bits_up`: eight for each byte of `bytes_down` and `bytes_up`: to the clients, and the updates that are
  merged, as their codecs make it
- `model_bytes_down`, `model_bytes_up`: of the weights that were sent to the clients whose updates are merged, or that
  failed, and of these updates, as models have them; left out where they are `bytes_down` and `bytes_up`
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fl_engine.fleet.uniformity import Times

ON_THE_SERVER = ("seconds_plan", "seconds_encode", "seconds_train", "seconds_merge", "seconds_evaluate")
"""Add up to `seconds_round`."""
SIMULATED = ("simulated_compute", "simulated_communication")
BITS = ("bits_down", "bits_up")
NAMES = (*ON_THE_SERVER, "seconds_decode", "seconds_encode_clients", *SIMULATED, *BITS)
REPEATED = (*SIMULATED, *BITS)
"""Metrics that repeat when a run is repeated, because no real clock measures them."""


@dataclass
class Stopwatch:
    """Seconds of phases that follow one another without a gap."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def ends(self, phase: str) -> None:
        """Add the time since the last call to this phase, which may have several parts."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.began
        self.began = now


def of_the_last(merged: Iterable[Times]) -> dict[str, float]:
    """Return the simulated phases of a round that merges these updates; empty if it merges none."""
    last = max(merged, key=lambda times: times.total, default=None)
    return {} if last is None else dict(zip(SIMULATED, (last.compute, last.communication), strict=True))


def bits(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the bits of a round, eight per byte."""
    return {"bits_down": 8 * metrics["bytes_down"], "bits_up": 8 * metrics["bytes_up"]}


def models(metrics: Mapping[str, float], down: int, up: int) -> dict[str, float]:
    """Return `model_bytes_down` and `model_bytes_up` of a round, if they differ from its bytes."""
    same = (down, up) == (metrics["bytes_down"], metrics["bytes_up"])
    return {} if same else {"model_bytes_down": float(down), "model_bytes_up": float(up)}


def waste(rounds: Sequence[Mapping[str, float]]) -> float:
    """Return the share of the weights that was sent in vain (AdaptiveFL Sec. 4.1): 1 - sum size(back) / sum size(sent).
    Sizes are before coding, because bytes that an upload codec saves are not waste."""
    down, up = (sum(m.get(f"model_bytes_{way}", m[f"bytes_{way}"]) for m in rounds) for way in ("down", "up"))
    return 1 - up / down if down else 0.0


def means(rounds: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Return the mean of each of these metrics over the rounds that have it, without metrics that no round has."""
    by_name = {name: [metrics[name] for metrics in rounds if metrics.get(name) is not None] for name in names}
    return {name: fmean(values) for name, values in by_name.items() if values}

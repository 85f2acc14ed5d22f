"""Kills runs, resumes them, and compares their outcome with that of an undisturbed run.

    python -m tests.harness.kills --kills 300 --seed 1 --only moto-processes,folder-whole --json

A kill is one of these faults:

- SIGKILL of the coordinator (at any time, within its rounds, or at a fault point inside the run store), of a worker
  process, a pod or a device (`run.backend=agents`);
- SIGSTOP of a pod with lifetime=run for longer than its lease, or of a device (`invited`);
- a coordinator, such a pod or a device is cut off from the store during a request, for a while or for good (`cuts`).

A coordinator that was killed, or has given up because the store does not answer, is restarted by the same command with
--resume. At the end the model, history.json and MLflow must equal those of an undisturbed run, no temporary files,
processes or objects may be left, and the devices must be idle. Exit code 0: all of this holds; 1: it does not, and the
folders of those runs remain.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_engine.core.errors import EnvironmentFailure
from tests.harness import cuts, invited
from tests.harness.outcome import Outcome, differences, leftovers, outcome
from tests.harness.processes import LOOK_S, Child, Done, workers
from tests.harness.way import How
from tests.harness.world import VARIANTS, Place, Variant, World, missing, opened, place

PER_RUN = (3, 8)
"""The least and the most times that one run is killed before it may finish."""
WAYS = ("any_time", "in_round", "fault_point", "fault_point")
"""The ways to kill a coordinator; each start draws one. `fault_point` is twice as likely, because there are many."""
MOMENTS = {
    "its lease": (b"/lease/",),
    "a state": (b"state.",),
    "a commit": (b"COMMITTED",),
    "a plan": (b"plan.json", b"closed.json"),
    "any request": (b" /",),
}
"""The requests in which a coordinator is cut off, and parts of their keys."""
SPARED = {"device": 0.5}
"""How often a coordinator is not killed, so that its clients meet more faults; by what runs the clients."""
HUNG_S = 7.0
"""Seconds that a pod hangs: longer than its lease (`world.STAYING`)."""
COORDINATOR = "coordinator cut off"
GIVES_UP: tuple[How, ...] = ("refused", "breaks")
"""How a coordinator is cut off for good, so that it gives up within a minute. With `hangs` it would wait for ten."""
POD_S = 0.3
"""About how many seconds a pod runs."""
HANGS_S = 600.0
ROUND = re.compile(r"^\S+ round \d+/", re.MULTILINE)
"""A line of the coordinator's log that reports a committed round."""


@dataclass(frozen=True)
class Undisturbed:
    outcome: Outcome
    left: list[str]
    operations: dict[str, int]
    """Number of calls of each operation of the store."""
    first_s: float
    """Seconds until the first round was committed."""
    round_s: float


class Lost(Exception):
    """The same command did not resume a run after a kill."""


@dataclass
class Tally:
    """The results of one variant's kills."""

    landed: Counter[str] = field(default_factory=Counter)
    """Number of kills by way: any_time, in_round, fault_point, worker, pod; killed, stopped or cut off (pods with
    lifetime=run, and devices); and COORDINATOR."""
    points: Counter[str] = field(default_factory=Counter)
    """Number of kills by fault point, or by the request in which a process was cut off."""
    lost: int = 0
    """Kills after which the same command did not resume the run."""
    wrong: list[str] = field(default_factory=list)
    runs: int = 0
    starts: int = 0
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return self.landed.total()


@dataclass
class Disturbed:
    """A run that is killed."""

    at: Place
    normal: Undisturbed
    rng: random.Random
    tally: Tally
    hit: set[str] = field(default_factory=set)
    """Names of pods that have met a fault."""


def lasts(child: Child, seconds: float) -> bool:
    """Whether the process still runs after so many seconds."""
    return not until(child, lambda: False, seconds) and child.poll() is None


def until(child: Child, condition: Callable[[], bool], timeout_s: float = HANGS_S) -> bool:
    """Wait until the condition holds, and return whether it did while the process ran."""
    end = time.monotonic() + timeout_s
    while child.poll() is None and time.monotonic() < end:
        if condition():
            return True
        time.sleep(LOOK_S)
    return False


def committed_rounds(child: Child) -> int:
    """Return how many rounds the coordinator has reported."""
    return len(ROUND.findall(child.err))


def at_any_time(child: Child, run: Disturbed) -> None:
    if lasts(child, run.rng.uniform(0, run.normal.first_s + 4 * run.normal.round_s)):
        child.kill()


def in_a_round(child: Child, run: Disturbed) -> None:
    after, more_s = run.rng.randint(1, 2), run.rng.uniform(0, 1.2 * run.normal.round_s)
    if until(child, lambda: committed_rounds(child) >= after) and lasts(child, more_s):
        child.kill()


def a_worker(child: Child, run: Disturbed, again: bool) -> bool:
    """Kill a worker, and return whether it died and the coordinator did not. `again`: a worker was killed before, so
    wait for a whole round. Otherwise one assignment could lose two workers, and its client would fail."""
    wanted = committed_rounds(child) + 2 if again else run.rng.randint(0, 2)
    if not until(child, lambda: committed_rounds(child) >= wanted and bool(workers(child.pid))):
        return False
    if not lasts(child, run.rng.uniform(0, run.normal.round_s)):
        return False
    victim = run.rng.choice(workers(child.pid) or [0])
    try:
        handle = os.pidfd_open(victim)
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], HANGS_S)
    finally:
        os.close(handle)
    return child.poll() is None


def a_coordinator_cut_off(child: Child, run: Disturbed) -> str:
    """Cut the coordinator off from the store. Return how and in which request; empty if it ended first."""
    assert run.at.way is not None
    if not lasts(child, run.rng.uniform(0, run.normal.first_s + 2 * run.normal.round_s)):
        return ""
    seconds = cuts.how_long(run.rng)
    hows = None if math.isfinite(seconds) else GIVES_UP
    return cuts.cut_off(run.at.way, child.pid, MOMENTS, seconds, run.rng, functools.partial(until, child), hows)


def a_pod_that_stays(child: Child, run: Disturbed, again: bool) -> str:
    """Kill a pod with lifetime=run, stop it for longer than its lease, or cut it off. Return which; empty if the
    coordinator ended first. No pod is hit twice, but its successor may be."""
    rng, running = run.rng, run.at.world.cluster.running
    fate = rng.choice(("killed", "stopped", "cut off"))
    if fate == "killed":
        return fate if a_pod(child, run, again, of_a_pod=lambda name: name) else ""
    while until(child, lambda: any(name not in run.hit for name in list(running))):
        name = rng.choice(sorted(set(running) - run.hit) or [""])
        if not lasts(child, rng.uniform(0, POD_S)) or (process := running.get(name)) is None:
            continue
        run.hit.add(name)
        if fate == "stopped":
            process.send(signal.SIGSTOP)
            lasts(child, HUNG_S)
            process.send(signal.SIGCONT)
            return fate
        wait, seconds = functools.partial(until, child), cuts.how_long(rng)
        if cut := cuts.cut_off(run.at.way, process.pid, invited.MOMENTS, seconds, rng, wait):
            run.tally.points[cut] += 1
            return fate
    return ""


def a_device(child: Child, run: Disturbed, again: bool) -> str:
    """Inject a lasting fault into a device (`Devices.hit`). Return which; empty if the coordinator ended first."""
    devices = run.at.devices
    assert devices is not None
    while lasts(child, run.rng.uniform(0, run.normal.round_s)) and until(child, lambda: bool(devices.well())):
        if fate := devices.hit(run.rng, functools.partial(until, child)):
            return fate
    return ""


def a_pod(
    child: Child, run: Disturbed, again: bool, of_a_pod: Callable[[str], str] = lambda name: name.rpartition("-")[0]
) -> bool:
    """Kill a pod, and return whether it died. Two pods of one index of a Job are not killed (`hit`), because the Job
    gives up an index that fails twice."""
    running = run.at.world.cluster.running

    def candidates() -> list[str]:
        return sorted(name for name in list(running) if of_a_pod(name) not in run.hit)

    while until(child, lambda: bool(candidates())):
        name = run.rng.choice(candidates() or [""])
        if not lasts(child, run.rng.uniform(0, POD_S)) or (process := running.get(name)) is None:
            continue
        process.kill()
        while (code := process.poll()) is None:
            time.sleep(LOOK_S)
        if code == -signal.SIGKILL:
            run.hit.add(of_a_pod(name))
            return True
    return False


def undisturbed(world: World, variant: Variant) -> Undisturbed:
    at = place(world, variant)
    counts = at.folder / "operations.json"
    started = time.monotonic()
    child = at.start({"counts": str(counts)})
    try:
        until(child, lambda: committed_rounds(child) > 0)
        first = time.monotonic()
        done = child.wait(HANGS_S)
        assert done.code == 0, done.err
        found = outcome(at, done)
        pace = (time.monotonic() - first) / world.rounds
        result = Undisturbed(found, leftovers(at), json.loads(counts.read_text()), first - started, pace)
    finally:
        child.kill()
        child.wait()
        at.close()
    at.remove()
    return result


def disturbed(at: Place, normal: Undisturbed, most: int, rng: random.Random, tally: Tally) -> list[str]:
    """Kill a run at most `most` times, and let it finish. Return a line for each thing that is wrong. Raises Lost."""
    left, run = min(most, rng.randint(*PER_RUN)), Disturbed(at, normal, rng, tally)
    tally.runs += 1
    while True:
        tally.starts += 1
        spared = SPARED.get(at.variant.clients, 0.0)
        ways = WAYS if at.way is None else (*WAYS, COORDINATOR)
        way = rng.choice(ways) if left and not (spared and rng.random() < spared) else ""
        point, cut = _point(normal, rng) if way == "fault_point" else None, ""
        child = at.start(point)
        try:
            left -= _clients(child, run, left - bool(way), 0.7 if way else 0.95)
            if way == "any_time":
                at_any_time(child, run)
            elif way == "in_round":
                in_a_round(child, run)
            elif way == COORDINATOR:
                cut = a_coordinator_cut_off(child, run)
            done = child.wait(HANGS_S)
        except TimeoutError as error:
            raise Lost(f"start {at.starts} hangs: {error}") from None
        finally:
            child.kill()
            child.wait()
        killed = way and done.code == -signal.SIGKILL
        if killed or cut:
            left -= 1
            tally.landed[way] += 1
            if point is not None or cut:
                tally.points[cut or f"{point['when']} {point['operation']}"] += 1
        if killed or (cut and done.code == EnvironmentFailure.exit_code):
            continue
        return verdict(at, normal, done)


def verdict(at: Place, normal: Undisturbed, done: Done) -> list[str]:
    """Return a line for each thing that is wrong with a run whose last command ended with `done`. Raises Lost."""
    if done.code != 0:
        raise Lost(f"start {at.starts} ended with {done.code}: {done.err[-2000:].strip()}")
    try:
        return differences(normal.outcome, outcome(at, done)) + leftovers(at)
    except Exception as error:  # any error means that the run has no valid outcome
        return [f"the outcome cannot be read: {error!r}"]


Hit = Callable[[Child, Disturbed, bool], bool | str]
HIT: dict[str, Hit] = {"worker": a_worker, "pod": a_pod, "staying": a_pod_that_stays, "device": a_device}
"""Hits a process that runs clients; by their kind. The last argument: whether another one was hit before. Returns
whether it was hit, or how."""


def _clients(child: Child, run: Disturbed, most: int, often: float) -> int:
    """Kill some of the processes that run clients, each further one with the probability `often`. Return how many."""
    kind, killed = run.at.variant.clients, 0
    while kind and killed < most and run.rng.random() < often:
        found = HIT[kind](child, run, killed > 0)
        if not found:
            break
        run.tally.landed[kind if found is True else found] += 1
        killed += 1
    return killed


def _whens(operation: str) -> tuple[str, ...]:
    """Return the moments at which an operation of the store can be killed (see `faults`)."""
    sends = operation[0].isupper() and not operation.startswith("List")
    return ("before", "middle", "after") if sends or operation == "write" else ("before", "after")


def _point(normal: Undisturbed, rng: random.Random) -> dict[str, Any]:
    operation = rng.choice(sorted(normal.operations))
    number = rng.randint(1, max(1, normal.operations[operation] // 3))  # so that a run is killed several times
    return {"operation": operation, "when": rng.choice(_whens(operation)), "number": number}


def campaign(world: World, variant: Variant, kills: int, seed: int) -> tuple[Tally, Undisturbed]:
    """Kill runs of one variant until there are `kills` kills."""
    rng, tally, started = random.Random(f"{seed}/{variant.name}"), Tally(), time.monotonic()
    normal = undisturbed(world, variant)
    tally.wrong += [f"the undisturbed run left {line}" for line in normal.left]
    while tally.kills < kills:
        assert tally.starts < 10 * kills + 20, f"{variant.name}: the kills do not land: {tally}"
        at, begun, before = place(world, variant), time.monotonic(), tally.kills
        try:
            wrong = disturbed(at, normal, kills - tally.kills, rng, tally)
        except Lost as error:
            tally.lost += 1
            wrong = [str(error)]
            world.cluster.objects.clear()  # a lost run does not clean up
        finally:
            at.close()
        if at.devices is not None:
            tally.points += at.devices.cuts
        took = time.monotonic() - begun
        say(f"{at.folder.name}: {tally.kills - before} kills, {took:.0f} s: {'wrong' if wrong else 'identical'}")
        if wrong:
            again = f"python -m tests.harness.kills --kills {kills} --rounds {world.rounds} --seed {seed} "
            again += f"--only {variant.name}"
            tally.wrong += [f"{at.folder}: {line}" for line in wrong]
            tally.wrong.append(f"{at.folder} is kept; to repeat it: {again}")
        else:
            at.remove()
    tally.seconds = time.monotonic() - started
    return tally, normal


def shares(kills: int, variants: Sequence[Variant]) -> dict[Variant, int]:
    """How many kills each variant gets."""
    least, more = divmod(kills, len(variants))
    return {variant: least + (place < more) for place, variant in enumerate(variants)}


def report(tallies: dict[str, Tally], same: bool, seed: int) -> dict[str, Any]:
    kills, lost = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("kills", "lost"))
    return {
        "kills": kills,
        "survived": kills - lost,
        "lost": lost,
        "identical": same and not any(tally.wrong for tally in tallies.values()),
        "starts": sum(tally.starts for tally in tallies.values()),
        "seconds": round(sum(tally.seconds for tally in tallies.values()), 1),
        "seed": seed,
        "variants": {name: vars(tally) | {"kills": tally.kills} for name, tally in tallies.items()},
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {variant.name: variant for variant in VARIANTS}
    p.add_argument("--kills", type=int, required=True, metavar="N", help="number of kills of all variants together")
    p.add_argument("--seed", type=int, default=0, help="seed of when and where kills fall")
    p.add_argument("--only", metavar="VARIANT,...", help=f"kill only runs of these, of {', '.join(names)}")
    p.add_argument("--rounds", type=int, default=8, metavar="N", help="rounds of each run (default: 8)")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = p.parse_args(argv)
    wanted = args.only.split(",") if args.only else list(names)
    if unknown := set(wanted) - names.keys():
        p.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for name in wanted:
        if why := missing(names[name].store):
            say(f"{name}: skipped, {why}")
    variants = [names[name] for name in wanted if not missing(names[name].store)]
    if not variants:
        p.error("none of these variants can run on this machine")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    tallies, models = {}, set()
    with opened(args.rounds) as world:
        for variant, kills in shares(args.kills, variants).items():
            tally, normal = campaign(world, variant, kills, args.seed)
            tallies[variant.name] = tally
            models.add(normal.outcome.model)
            landed = ", ".join(f"{way} {count}" for way, count in sorted(tally.landed.items()))
            state = f"{tally.lost} lost, not identical" if tally.wrong else "identical"
            say(
                f"{variant.name}: {tally.kills} kills ({landed}) of {tally.runs} runs, {tally.starts} starts, "
                f"{tally.seconds:.0f} s: {state}"
            )
            for line in tally.wrong:
                say(f"  {line}")
    if len(models) > 1:
        say(f"the undisturbed runs of these variants end with different models: {', '.join(wanted)}")
    found = report(tallies, len(models) == 1, args.seed)
    if args.json:
        print(json.dumps(found))
    return 0 if found["identical"] and not found["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compare the speed of flexfleet with other frameworks and with a hand-written loop.

Each framework (contestant) runs in its own process, which runs rounds on request (see `benchmarks.gate`). The
contestants alternate in short turns, so that other load on the machine affects all of them equally.

Flower, pfl-research and FedJAX have separate virtual environments, which `make bench-peers` creates from
benchmarks/requirements/.

Usage:
    `python -m benchmarks W3 --against naive,flower,pfl`: Compare flexfleet with three contestants on W3.
    `python -m benchmarks W1 --precision bf16`: Compare flexfleet in bf16 and fp32 with the naive loop in fp32.
    `python -m benchmarks W1 --device cuda`: Run flexfleet and the naive loop on one GPU.
    `python -m benchmarks --json W1`: Print the results as one line of JSON.
    `python -m benchmarks W8`: Measure the speed of the codec QSGD (see `benchmarks.codecs`).
    `make bench`: Compare flexfleet with the naive loop on all workloads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import codecs
from benchmarks.gate import family
from benchmarks.workloads import PRECISIONS, WORKLOADS, Workload, count

ROOT = Path(__file__).parents[1]
CODECS = "W8"
PEERS = ("naive", "flower", "pfl", "fedjax")
FP32 = "ours-fp32"
"""Name of the additional contestant that runs flexfleet in fp32 if `ours` uses another precision."""
COUNTED = 50
"""Maximum number of rounds over which the number of operations per round is averaged."""
BUSY = 0.1
"""The table reports the load of other programs if they use more than this fraction of the processors."""


class Contestant:
    """Process of a contestant. The constructor starts the process, and `run` makes it run rounds."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        module = "ours" if name == FP32 else name
        command = [str(python_of(name)), "-m", f"benchmarks.{module}", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # Redirect stderr to a file, because a full pipe would block the contestant.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the contestant
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True,
        )  # fmt: skip
        self._receive()

    def run(self, rounds: int) -> list[float]:
        """Run `rounds` rounds and return the seconds of each round."""
        self._send(str(rounds))
        return list(self._receive()["seconds"])

    def cpu_seconds(self) -> float:
        ticks = sum(int(value) for _, values in family(self._process.pid) for value in values[11:13])  # user, system
        return ticks / os.sysconf("SC_CLK_TCK")

    def finish(self) -> float:
        """End the process and return its peak memory in MB."""
        self._send("")
        peak = float(self._receive()["peak_mb"])
        self._process.wait(timeout=60)
        return peak

    def _send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 3000))
            raise SystemExit(f"{self.name} ended:\n{self._log.read().decode(errors='replace')}")
        found: dict[str, Any] = json.loads(line)
        return found


def python_of(name: str) -> Path:
    """Return the Python interpreter of a contestant's virtual environment."""
    if name in ("ours", FP32, "naive"):
        return Path(sys.executable)
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{name} is not installed. Run `make bench-peers` to create .venv-{name}")
    return python


def compete(workload: str, peers: Sequence[str], turns: int, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    """Measure each contestant in `turns` short turns. The contestants alternate, and the rounds of a turn take about
    `seconds`. If `options` set a precision, flexfleet in fp32 is an additional contestant.
    """
    peers = [*([FP32] if "--precision" in options else []), *peers]
    contestants: dict[str, Contestant] = {}
    rounds: dict[str, int] = {}
    for name in ("ours", *peers):
        given = [workload, *(options if name == "ours" else _for_peers(name, options))]
        contestants[name] = Contestant(name, given)
        warm = contestants[name].run(2)[1:]
        rounds[name] = max(1, min(200, int(seconds / statistics.median(warm))))
        note(f"{name}: {rounds[name]} round(s) a turn")
    busy, measured, used = [others_busy()], {name: [] for name in contestants}, dict.fromkeys(contestants, 0.0)
    peaks, gpu = [], "cuda" in options
    for turn in range(turns):
        for name, contestant in contestants.items():
            before = contestant.cpu_seconds()
            measured[name] += contestant.run(rounds[name])
            used[name] += contestant.cpu_seconds() - before
        peaks.append(gpu_gflops() if gpu else matmul_gflops())
        busy.append(others_busy())
        note(f"turn {turn + 1} of {turns}")
    memory = {name: contestant.finish() for name, contestant in contestants.items()}
    medians = {name: statistics.median(values) for name, values in measured.items()}
    arithmetic = gflop(workload, options, min(COUNTED, 2 + turns * rounds["ours"]))
    peak = max(peaks)
    return {
        "workload": workload,
        "ours_s": medians["ours"],
        "peers": {name: medians[name] for name in peers},
        "ratios": {name: medians[name] / medians["ours"] for name in peers},
        "cpu_s": {name: used[name] / turns / rounds[name] for name in medians},
        "gflops": {name: arithmetic / medians[name] for name in medians},
        "peak_gflops": peak,
        "peak_share": arithmetic / medians["ours"] / peak,
        "peak_mb": memory,
        "quartiles_s": {name: _quartiles(values) for name, values in measured.items()},
        "others_busy": max(busy),
        "options": list(options),
        "processor": torch.cuda.get_device_name() if gpu else processor(),
    }


def _for_peers(name: str, options: Sequence[str]) -> list[str]:
    """Return only the options that the peer supports. Only flexfleet in fp32 and the naive loop support `--devices`."""
    own = ("--precision",) if name in (FP32, "naive") else ("--precision", "--devices")
    out: list[str] = []
    keep = True
    for option in options:
        if option.startswith("--"):
            keep = option not in own
        if keep:
            out.append(option)
    return out


def _quartiles(values: Sequence[float]) -> list[float]:
    return [values[0]] * 2 if len(values) < 2 else [statistics.quantiles(values, n=4)[i] for i in (0, 2)]


# ---------------------------------------------------------------------------------------------- the machine
def others_busy(seconds: float = 1.0) -> float:
    """Return the fraction of the processors that other programs use. All contestants wait during the measurement."""
    before, idle = _cpu_times()
    time.sleep(seconds)
    after, idle_after = _cpu_times()
    return 1 - (idle_after - idle) / max(1.0, after - before)


def processor() -> str:
    """Return the processor's name and the bfloat16 instructions that it supports."""
    from fl_engine.training.numerics import cpu_bf16

    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return ", ".join([*(names or [platform.processor() or platform.machine()])[:1], *cpu_bf16()])


def _cpu_times() -> tuple[float, float]:
    try:
        fields = [float(f) for f in Path("/proc/stat").read_text("utf-8").splitlines()[0].split()[1:]]
    except OSError:  # /proc/stat exists only on Linux.
        return 0.0, 0.0
    return sum(fields), fields[3] + fields[4]


def matmul_gflops(size: int = 1024, repeats: int = 10) -> float:
    """Measure GFLOP/s of float32 matrix products that run on all processors in parallel."""
    code = (
        "import sys, time, torch; torch.set_num_threads(1)\n"
        "n, k = map(int, sys.argv[1:]); a = torch.rand(n, n); a @ a\n"
        "sys.stdin.readline(); t = time.perf_counter()\n"
        "for _ in range(k): a @ a\n"
        "print(k * 2 * n**3 / (time.perf_counter() - t) / 1e9)"
    )
    command = [sys.executable, "-c", code, str(size), str(repeats)]
    several = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(os.cpu_count() or 1)
    ]
    time.sleep(3)  # Wait until all processes have imported torch.
    for one in several:
        assert one.stdin
        one.stdin.write("\n")
        one.stdin.flush()
    return sum(float(one.communicate()[0]) for one in several)


def gpu_gflops(size: int = 8192, repeats: int = 10) -> float:
    """Measure GFLOP/s of float32 matrix products on the GPU."""
    a = torch.rand(size, size, device="cuda")
    a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        a @ a
    torch.cuda.synchronize()
    return repeats * 2 * size**3 / (time.perf_counter() - began) / 1e9


def gflop(workload: str, options: Sequence[str], rounds: int) -> float:
    """Return the mean GFLOP per round of the first `rounds` rounds. A training step counts as three forward passes, and
    each distillation teacher adds one forward pass.
    """
    from benchmarks.ours import site_of, works_of
    from benchmarks.workloads import chosen
    from fl_engine.core.costs import macs_per_sample

    name, w, _ = chosen([workload, *options])
    algorithm, site = site_of(name, w)
    works = chain.from_iterable(islice(works_of(algorithm, site), rounds))
    macs = sum(macs_per_sample(site.family, work.task) for work in works)
    return 2 * macs * w.samples * w.epochs / rounds / 1e9


# ------------------------------------------------------------------------------------------------- the report
def table(found: dict[str, Any], w: Workload) -> str:
    options = ", ".join(["", *found["options"]]) if found["options"] else ""
    lines = [f"{found['workload']}  {w.title}: {w.per_round} of {w.clients} clients{options}"]
    lines.append(
        f"{'':10}{'s/round':>10}{'quartiles':>20}{'ratio':>8}{'CPU s':>9}{'GFLOP/s':>10}{'of peak':>9}{'MB':>8}"
    )
    for name, gflops in found["gflops"].items():
        seconds = found["ours_s"] if name == "ours" else found["peers"][name]
        low, high = found["quartiles_s"][name]
        ratio = f"{found['ratios'][name]:.2f}" if name in found["ratios"] else ""
        share = f"{100 * gflops / found['peak_gflops']:.1f} %"
        spread = f"{low:.4g} - {high:.4g}"
        lines.append(
            f"{name:10}{seconds:10.4g}{spread:>20}{ratio:>8}{found['cpu_s'][name]:9.4g}{gflops:10.1f}{share:>9}{found['peak_mb'][name]:8.0f}"
        )
    where = "the GPU" if "cuda" in found["options"] else "all processors"
    lines.append(f"{found['processor']}; matrix products on {where}: {found['peak_gflops']:.0f} GFLOP/s")
    if found["others_busy"] > BUSY:
        lines.append(f"the machine was not idle: other programs used up to {100 * found['others_busy']:.0f} % of it")
    return "\n".join(lines)


def report(found: dict[str, Any], text: str, as_json: bool) -> None:
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps(found), flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*WORKLOADS, CODECS]
    p.add_argument("workloads", nargs="+", choices=names, metavar="WORKLOAD", help=", ".join(names))
    p.add_argument("--against", default="naive", help=f"peers to compare with, any of {','.join(PEERS)}")
    p.add_argument("--turns", type=count, default=5, help="turns of each contestant (default: 5)")
    p.add_argument("--seconds", type=float, default=10.0, help="approximate length of a turn (default: 10)")
    p.add_argument("--samples", type=count, help="samples of each client (default: the workload's)")
    p.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="precision of flexfleet; peers use fp32, and flexfleet is measured in fp32 too",
    )
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of flexfleet and the naive loop")
    p.add_argument("--json", action="store_true", help="print one line of JSON for each workload on stdout")
    args = p.parse_args(argv)
    asked = args.against.split(",")
    if args.device == "cuda":
        if not torch.cuda.is_available():
            p.error("--device cuda requires a GPU, but torch does not find one")
        if asked != ["naive"]:
            p.error("--device cuda supports only --against naive")
    if unknown := [peer for peer in asked if peer not in PEERS]:
        p.error(f"--against must contain only names from {', '.join(PEERS)}, got {unknown[0]!r}")
    options = [] if args.samples is None else ["--samples", str(args.samples)]
    options += [] if args.device == "cpu" else ["--devices", "cuda"]
    options += [] if args.precision == "fp32" else ["--precision", args.precision]
    for name in args.workloads:
        if name == CODECS:
            report(speeds := codecs.compete(args.turns), codecs.table(speeds), args.json)
            continue
        peers = [peer for peer in asked if peer in WORKLOADS[name].peers]
        for peer in asked:
            if peer not in peers:
                note(f"{peer} does not run {name}")
        found = compete(name, peers, args.turns, args.seconds, options)
        report(found, table(found, WORKLOADS[name]), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

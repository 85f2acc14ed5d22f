"""How fast rounds are beside a loop written by hand; the two take turns in this process.

Other work on the machine slows both down, so their ratio can be compared between nights. The loop does less than a
round (it sends, prunes, distils, averages and evaluates nothing), so the ratio is no figure of merit. Such figures are
in benchmarks/.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from fl_engine.aggregation import privacy
from fl_engine.backends import InProcess
from fl_engine.core.samples import outputs_of
from fl_engine.core.slicing import runnable
from fl_engine.exchange.client import Site, Work, accept
from fl_engine.rounds import loop
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, codecs
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.site import initial_state, site_of, trace_of
from flexfleet.tracking.trackers import Several

ROUNDS = 1


def pace(config: Config, run: Path, turns: int) -> list[float]:
    """Seconds of ROUNDS rounds divided by seconds of the loop with the same clients and sub-models, one ratio for each
    turn. `run`: folder of a run of this configuration, for its partition and pool."""
    resolved = Resolved.of(config)
    site = site_of(resolved, run / "partition", run / "pool")
    measured = _run(resolved, site)
    ratios = []
    for turn in range(turns + 1):
        ours, by_hand = _rounds(resolved, measured), _by_hand(resolved, measured)
        if turn:  # the first warms up both
            ratios.append(ours / by_hand)
    return ratios


def _run(resolved: Resolved, site: Site) -> Run:
    """The run whose pace is measured. Its noise follows from the seed, which is no secret: nothing of it is kept."""
    config, algorithm = resolved.config, resolved.algorithm
    noise_key = privacy.noise_key(str(config.seed).encode(), "pace") if privacy.is_private(algorithm) else None
    trace, _ = trace_of(config, site)
    terms = config.rounds.model_copy(update={"stop": ROUNDS, "evaluate_every": ROUNDS})
    return Run(
        algorithm,
        site,
        terms,
        config.run.devices,
        noise_key=noise_key,
        codecs=codecs(config),
        trace=trace,
        wait_s=config.fleet.wait_s,
    )


def _rounds(resolved: Resolved, run: Run) -> float:
    config, site, state = resolved.config, run.site, initial_state(resolved, run.site)
    with tempfile.TemporaryDirectory() as folder:
        ledger, backend = ledger_in(FolderStore(Path(folder))), InProcess(site, config.run.devices)
        fresh = replace(run)  # keeps nothing that an earlier turn has computed
        started = time.perf_counter()
        loop.federate(fresh, state, backend, ledger, Several([]))
        return time.perf_counter() - started


def _by_hand(resolved: Resolved, run: Run) -> float:
    config, algorithm, site, state = resolved.config, run.algorithm, run.site, initial_state(resolved, run.site)
    works = [
        work
        for round in range(ROUNDS)
        for order in algorithm.plan(state, run.context(round, run.begins(round, 0.0))).orders
        if isinstance(work := accept(algorithm, order, site), Work)
    ]
    samples = site.data.normalise(site.data.train_x)
    started = time.perf_counter()
    for work in works:
        _train(config, site, work, samples[torch.from_numpy(work.indices)], site.data.train_y[work.indices])
    return time.perf_counter() - started


def _train(config: Config, site: Site, work: Work, x: torch.Tensor, y: torch.Tensor) -> None:
    t = config.training
    network = runnable(site.family, work.task.spec, {k: v.clone() for k, v in work.start.items()}).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=t.lr, momentum=t.momentum, weight_decay=t.weight_decay)
    for _ in range(t.epochs):
        for batch in torch.split(torch.randperm(len(y)), t.batch_size):
            if len(batch) < t.batch_size and t.drop_last:
                continue
            loss = site.data.task.loss(outputs_of(network(x[batch]))[-1], y[batch]).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()


def machine() -> dict[str, str]:
    """What memory and pace depend on: they are not compared with figures of other machines."""
    model = "unknown"
    with (
        open("/proc/cpuinfo", encoding="utf-8")
        if os.path.exists("/proc/cpuinfo")
        else open(os.devnull, encoding="utf-8") as file
    ):
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    return {
        "cpu": model,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
    }

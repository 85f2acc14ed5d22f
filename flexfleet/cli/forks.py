"""Commands that continue a run with other settings or without some clients: fork, contributions, forget."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

from flexfleet.config.run_names import dated
from flexfleet.experiments.compare import check_jobs
from flexfleet.files.artifacts import RunResult
from flexfleet.files.terminal import show
from flexfleet.pipeline import contributions as measuring
from flexfleet.pipeline import fork as forking
from flexfleet.pipeline.fork import CERTIFICATE, clients_of
from flexfleet.pipeline.resume import Attempt
from flexfleet.reports.finished_run import load_all
from flexfleet.reports.report import table

log = logging.getLogger("flexfleet")


def fork(args: argparse.Namespace) -> None:
    without = clients_of(args.without, args.run)
    run_id = args.run_id or dated(f"{args.run.resolve().name}-fork")
    _show(args, forking.fork(args.run, run_id, args.at, args.set, without, Attempt(args.resume)))


def forget(args: argparse.Namespace) -> None:
    clients = clients_of([f"client={args.client}"], args.run)
    run_id = args.run_id or dated(f"{args.run.resolve().name}-without-{args.client.replace(',', '-')}")
    result = forking.forget(args.run, run_id, clients, Attempt(args.resume))
    _show(args, result)
    log.info("wrote the certificate %s next to %s; `flexfleet verify` checks it", CERTIFICATE, result.report)


def _show(args: argparse.Namespace, result: RunResult) -> None:
    if args.json:
        show(result.model_dump_json())
        return
    show(table(load_all([args.run, Path(result.report).parent])))
    show(f"report: {result.report}")


def contributions(args: argparse.Namespace) -> None:
    check_jobs(args.jobs)
    planned = measuring.plan(args.run, args.by)
    (log.info if args.json else show)(planned.cost(args.jobs))
    found = measuring.contributions(args.run, planned, args.jobs)
    if args.json:
        show(json.dumps({"metric": "avg", "contributions": [asdict(each) for each in found]}))
        return
    show(f"{'without':16}{'clients':>9}{'rounds':>8}{'avg':>9}{'contribution':>14}")
    for each in found:
        show(f"{each.name:16}{len(each.clients):>9}{each.rounds:>8}{each.avg:>9.4f}{each.contribution:>+14.4f}")

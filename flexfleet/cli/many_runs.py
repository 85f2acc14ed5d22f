"""Commands that start several runs: compare, tune, regress."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

from fl_engine.core.allowed import trust
from fl_engine.core.errors import ConfigError, GateFailed
from flexfleet.cli.listing import list_
from flexfleet.cli.runs import check_resume, show_tracked
from flexfleet.config import Config, comparison_runs, load_config
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.config.dotted import Overrides
from flexfleet.config.read import read_file
from flexfleet.config.run_names import dated
from flexfleet.experiments import nightly, published_suites, webhook
from flexfleet.experiments.compare import check_jobs, run_comparison
from flexfleet.experiments.comparison_report import text as table
from flexfleet.experiments.tune import tune as search
from flexfleet.experiments.tune_report import text
from flexfleet.files.terminal import show
from flexfleet.pipeline.prepare import config_of

log = logging.getLogger("flexfleet")


def compare(args: argparse.Namespace) -> None:
    if args.suites:
        return list_(argparse.Namespace(what="suites", json=args.json))
    check_resume(args, "--id")

    def load(overrides: Overrides) -> Config:
        return config_of(argparse.Namespace(config=args.config, set=overrides))

    to = () if args.to is None else comparison_runs.accuracies_of(args.to)
    factors = comparison_runs.factors_of(args.over)
    name = dated("compare") if args.id is None else args.id
    references: list[PlannedRun] = []
    if args.suite is not None:
        load_suite = partial(load_config, args.config, stored=True)
        suite = published_suites.load(args.suite)
        trust([*map(read_file, args.config or ()), args.set])  # trust only the user's settings, not the suite's classes
        to = to or suite.to
        picked = (args.algorithms, args.seeds, args.set, load_suite, name, factors)
        runs, references = published_suites.entries_of(suite, *picked)
        references = [] if args.central else references
    elif args.algorithms is not None:
        labels = comparison_runs.label_overrides(comparison_runs.labels_of(args.algorithms), args.set)
        comparison_runs.check_factors(factors, args.set)
        seeds = None if args.seeds is None else comparison_runs.seeds_of(args.seeds)
        runs = comparison_runs.entries_from(labels, seeds, load, name, factors)
    else:
        raise ConfigError("compare needs --suite or --algorithms, such as flexfl,all_large", code="config.missing")

    options = [f"--{o.replace('_', '-')}" for o in ("discard_damaged", "accept_numerics") if getattr(args, o)]
    comparison = run_comparison(
        runs,
        name,
        to=to,
        at_once=args.jobs,
        resume=args.resume,
        options=options,
        central=args.central,
        references=references,
    )
    if args.json:
        show(comparison.model_dump_json())
    else:
        show(table(comparison, brief=True))
        show(f"page: {comparison_runs.folder_of(runs) / 'comparison.html'} (all tables: comparison.md)")
        show_tracked(runs[0].config)


def tune(args: argparse.Namespace) -> None:
    check_resume(args, "--id")
    if args.jobs is not None:
        args.set = {**args.set, "tune.workers": args.jobs}
    name = dated("tune") if args.id is None else args.id
    config = config_of(args)
    tuned = search(config, name, resume=args.resume)
    show(tuned.model_dump_json() if args.json else text(tuned, Path(config.run.store) / name))


def regress(args: argparse.Namespace) -> int:
    id = dated("night") if args.id is None else args.id
    check_jobs(args.jobs)
    if args.update:
        run = nightly.prepare(args.suite, id, args.set, update=True)
        log.info("folder: %s", run.folder)
        figures = nightly.update(run, jobs=args.jobs, resume=args.resume)
        show(figures.model_dump_json() if args.json else f"reference: {run.reference}")
        return 0
    with webhook.reported_errors(id):
        run = nightly.prepare(args.suite, id, args.set)
        log.info("folder: %s", run.folder)
        verdict = nightly.regress(run, jobs=args.jobs, resume=args.resume)
    show(verdict.model_dump_json() if args.json else verdict.text(every=not args.quiet))
    if not verdict.passed:
        webhook.call(verdict.text())
    return 0 if verdict.passed else GateFailed.exit_code

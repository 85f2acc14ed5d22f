"""The commands of many runs: compare, tune, regress."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fl_engine.core.errors import ConfigError
from flexfleet.cli.runs import where_tracked
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from flexfleet.config import Config, Overrides

log = logging.getLogger("flexfleet")


def compare(args: argparse.Namespace) -> int:
    from flexfleet.config import comparison_runs, load_config
    from flexfleet.config.comparison_runs import Entry
    from flexfleet.config.read import trust_given
    from flexfleet.config.run_names import dated
    from flexfleet.experiments import published_suites
    from flexfleet.pipeline.prepare import config_of

    if args.suites:
        return list_suites(args)
    if args.resume and args.id is None:
        raise ConfigError("--resume needs --id: the name of the comparison to resume, a folder of the run store")

    def load(overrides: Overrides) -> Config:
        return config_of(argparse.Namespace(config=args.config, set=overrides))

    def load_suite(overrides: Overrides) -> Config:
        return load_config(args.config, overrides, stored=True)

    to = () if args.to is None else comparison_runs.accuracies_of(args.to)
    factors = comparison_runs.factors_of(args.over)
    name = dated("compare") if args.id is None else args.id
    references: list[Entry] = []
    if args.suite is not None:
        suite, picked = published_suites.load(args.suite), (args.algorithms, args.seeds, args.set, load_suite, name)
        trust_given(args.config, args.set)  # not what the suite names, which is somebody else's file
        to = to or suite.to
        runs = published_suites.entries_of(suite, *picked, factors)
        references = [] if args.central else published_suites.central_of(suite, *picked)
    elif args.algorithms is not None:
        labels = comparison_runs.label_overrides(comparison_runs.labels_of(args.algorithms), args.set)
        comparison_runs.check_factors(factors, args.set)
        seeds = None if args.seeds is None else comparison_runs.seeds_of(args.seeds)
        runs = comparison_runs.entries_from(labels, seeds, load, name, factors)
    else:
        raise ConfigError("compare needs --algorithms, e.g. --algorithms flexfl,all_large, or --suite")

    from flexfleet.experiments.compare import run_comparison as compare_all
    from flexfleet.experiments.comparison_report import text as table

    options = [f"--{o.replace('_', '-')}" for o in ("discard_damaged", "accept_numerics") if getattr(args, o)]
    comparison = compare_all(
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
        show(table(comparison))
        show(f"page: {comparison_runs.folder_of(runs) / 'comparison.html'}")
        if runs[0].config.tracking.mlflow:
            show(where_tracked(runs[0].config.tracking.mlflow))
    return 0


def list_suites(args: argparse.Namespace) -> int:
    """Prints the suites that come with flexfleet: a small one below the one that it stands for."""
    from dataclasses import asdict

    from flexfleet.experiments import published_suites

    found = {one.name: one for one in published_suites.listed()}
    if args.json:
        show(json.dumps({"suites": [asdict(one) for one in found.values()]}))
        return 0
    small, lines = {one.small for one in found.values()}, []
    for one in found.values():
        if one.name not in small:
            lines += [one.name, f"  paper  {one.paper}", f"  shows  {one.shows}", f"  cost   {one.cost}"]
            lines += [f"  lacks  {one.lacks}"] if one.lacks else []
            lines += [f"  small  {one.small}: {found[one.small].cost}"] if one.small else []
    show("\n".join(lines))
    return 0


def tune(args: argparse.Namespace) -> int:
    from flexfleet.config.run_names import dated
    from flexfleet.pipeline.prepare import config_of

    if args.resume and args.id is None:
        raise ConfigError("--resume needs --id: the name of the study to resume, a folder of the run store")
    if args.jobs is not None:
        args.set = {**args.set, "tune.workers": args.jobs}
    name = dated("tune") if args.id is None else args.id
    config = config_of(args)

    from flexfleet.experiments.tune import tune as search
    from flexfleet.experiments.tune_report import told

    tuned = search(config, name, resume=args.resume)
    show(tuned.model_dump_json() if args.json else told(tuned, Path(config.run.store) / name))
    return 0


def regress(args: argparse.Namespace) -> int:
    from fl_engine.core.errors import GateFailed
    from flexfleet.config.run_names import dated
    from flexfleet.experiments import nightly as step
    from flexfleet.experiments import webhook
    from flexfleet.experiments.compare import check_jobs

    id = dated("night") if args.id is None else args.id
    check_jobs(args.jobs)
    if args.update:
        night = step.prepare(args.suite, id, args.set, update=True)
        log.info("folder: %s", night.folder)
        figures = step.update(night, jobs=args.jobs, resume=args.resume)
        show(figures.model_dump_json() if args.json else f"reference: {night.path.with_suffix('.json')}")
        return 0
    with webhook.told_without_verdict(id):
        night = step.prepare(args.suite, id, args.set)
        log.info("folder: %s", night.folder)
        verdict = step.regress(night, jobs=args.jobs, resume=args.resume)
    show(verdict.model_dump_json() if args.json else step.told(verdict, every=True))
    if not verdict.passed:
        webhook.call(step.told(verdict))
    return 0 if verdict.passed else GateFailed.exit_code

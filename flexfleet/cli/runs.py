"""The commands of one run: run, central, check, report, status."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError, Diverged, FlexfleetError, masked
from fl_engine.core.system import seldom_collected
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from flexfleet.config import Config

log = logging.getLogger("flexfleet")


def run(args: argparse.Namespace) -> int:
    from flexfleet.config.run_names import new_name
    from flexfleet.pipeline.prepare import resolved_of
    from flexfleet.pipeline.run import run as run_all

    resumes_by_name(args)
    resolved = resolved_of(args)
    config = resolved.config
    run_id = new_name(config) if args.run_id is None else args.run_id
    tell_if_new(config, Path(config.run.store) / run_id, args.resume)
    result = run_all(
        resolved,
        run_id,
        resume=args.resume,
        discard_damaged=args.discard_damaged,
        accept_numerics=args.accept_numerics,
        shared=args.shared,
        tags=tags_of(args.tag),
    )
    from flexfleet.files.run_status import tally_in

    tally = tally_in(out := Path(config.run.store) / run_id)
    if args.json:
        show(result.model_dump_json())
    else:
        from flexfleet.files.measure import Measure
        from flexfleet.reports import precisions
        from flexfleet.reports.report import table

        show(table([out]))
        if found := precisions.of_run(out, list(result.metrics["levels"]), result.model_sha256):
            show(precisions.table(found))
        show(f"report: {result.report}")
        if config.tracking.mlflow:
            show(where_tracked(config.tracking.mlflow))
        avg = Measure(resolved.data.task.metric.name).with_unit(result.metrics["avg"])
        show(f"{run_id} {result.status}: avg {avg}, {tally}")
    return 0 if result.status == "finished" else Diverged.exit_code


def central(args: argparse.Namespace) -> int:
    from flexfleet.config.run_names import dated
    from flexfleet.pipeline.central import central as train
    from flexfleet.pipeline.prepare import resolved_of

    resumes_by_name(args)
    resolved = resolved_of(args)
    config = resolved.config
    run_id = dated(f"central-s{config.seed}") if args.run_id is None else args.run_id
    tell_if_new(config, Path(config.run.store) / run_id, args.resume)
    result = train(
        resolved,
        run_id,
        resume=args.resume,
        discard_damaged=args.discard_damaged,
        accept_numerics=args.accept_numerics,
        tags=tags_of(args.tag),
    )
    if args.json:
        show(result.model_dump_json())
        return 0
    from flexfleet.files.measure import Measure

    m, measure = result.metrics, Measure(resolved.data.task.metric.name)
    best = f"best {measure.with_unit(m['best']['full'])} after epoch {m['best']['round']}"
    show(f"{result.run_id}: {measure.name} {measure.with_unit(m['full'])} after {config.central.epochs} epochs, {best}")
    show(f"curve: {result.report}")
    if config.tracking.mlflow:
        show(where_tracked(config.tracking.mlflow))
    return 0


def check(args: argparse.Namespace) -> int:
    from flexfleet.files.progress import kept_warnings
    from flexfleet.pipeline.check import check as examine
    from flexfleet.pipeline.prepare import resolved_of

    with kept_warnings() as warnings:
        answer = examine(resolved_of(args))
    if warnings and args.json:
        answer["warnings"] = warnings
    show(json.dumps(answer) if args.json else "ok: " + ", ".join(f"{k} {v}" for k, v in answer.items() if k != "ok"))
    return 0


def report(args: argparse.Namespace) -> int:
    with stopping_at_once(), seldom_collected():
        from flexfleet.reports.report import load_all, report_of, table_of

        loaded = load_all(args.runs)
        page = report_of(loaded, args.out)
    if args.json:
        show(json.dumps({"report": str(page), "runs": [str(r) for r in args.runs]}))
    else:
        show(table_of(loaded))
        show(f"report: {page}")
    return 0


def status(args: argparse.Namespace) -> int:
    from flexfleet.files.measure import Measure
    from flexfleet.pipeline.prepare import config_of
    from flexfleet.pipeline.status import describe, list_runs, runs_in

    config, one = None, False
    if args.run is not None:
        rows = runs_in(args.run)
        if one := not rows:
            rows = [describe(args.run)]
    else:
        config = config_of(args)
        rows = list_runs(Path(config.run.store))
        if not rows and not args.json:
            show(f"{config.run.store} holds no run yet")
    if not args.json:
        longest = max([40, *(len(row["run_id"]) for row in rows)])
        for row in rows:
            if "why" in row:
                show(f"{row['run_id']:{longest}} {row['status']:14} {row['why']}")
                continue
            measure, last = Measure(row["metric"] or ""), ""
            if row["avg"] is not None:
                last = f"  avg {measure.with_unit(row['avg'])}  full {measure.with_unit(row['full'])}"
            show(f"{row['run_id']:{longest}} {row['status']:14} round {row['round']}/{row['stop']}{last}")
    devices = [] if config is None else _invited(config)
    if args.json:
        about = {"runs": rows, "agents": devices} if devices else {"runs": rows}
        show(json.dumps(rows[0] if one else about))
        return 0
    for each in devices:
        did = f"{each['answers']} answered, {each['lost']} lost{', last ' + each['last'] if each['last'] else ''}"
        seen = f" seen {each['seen']}" if each["seen"] else ""
        why = f": {each['said']}" if each["said"] else ""
        show(f"{each['name']:20} {each['state']:10}{seen}  {did}{why}")
    return 0


def _invited(config: Config) -> list[dict[str, Any]]:
    """Return the invited devices, or none if they cannot be listed: the list of runs is shown all the same."""
    from flexfleet.pipeline import enrollment

    try:
        return enrollment.status(config)
    except FlexfleetError as error:
        log.warning("cannot list the invited devices: %s", error)
        return []


# ------------------------------------------------------------------------------------------------- shared
def resumes_by_name(args: argparse.Namespace) -> None:
    """Raise ConfigError if `--resume` is given without the name of a run."""
    if args.resume and args.run_id is None:
        raise ConfigError("--resume needs --run-id: the name of the run to resume, a folder of the run store")


def tell_if_new(config: Config, folder: Path, resume: bool) -> None:
    """Log that `--resume` finds no run and a new one begins. A repeated task may not know whether it has begun."""
    if resume and config.run.remote is None and not folder.exists():
        log.info("--resume: %s does not exist, so a new run begins", folder)


def tags_of(texts: Sequence[str], option: str = "--tag") -> dict[str, str]:
    """Return the values of a repeatable `key=value` option, by key. Raises ConfigError."""
    pairs = [text.partition("=") for text in texts]
    wrong = [text for text, (key, sign, _) in zip(texts, pairs, strict=True) if not key or not sign]
    if wrong:
        raise ConfigError(f"{option} takes key=value, got {wrong[0]!r}")
    return {key: value for key, _, value in pairs}


def where_tracked(uri: str) -> str:
    """Return where to see the run in MLflow: the server's address, or the command that starts one for a database."""
    if uri.startswith(("http://", "https://")):
        return f"MLflow: {masked(uri)}"
    return f"MLflow: mlflow ui --backend-store-uri {masked(uri)}"

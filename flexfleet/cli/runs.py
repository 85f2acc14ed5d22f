"""Commands for one configuration or for finished runs: run, central, pool, check, report, status, gc."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from fl_engine.core.contracts import ModelFamily, PublishedFor
from fl_engine.core.costs import count_macs
from fl_engine.core.errors import ConfigError, Diverged, EnvironmentFailure, FlexfleetError, IntegrityError, masked
from fl_engine.core.types import SubmodelSpec
from fl_engine.models.build import model_kind
from fl_engine.preparation.weights import given as weights_of
from fl_engine.rounds.server import ServerSite
from flexfleet.cli.connections import connections
from flexfleet.config import Config
from flexfleet.config.run_names import dated, new_name
from flexfleet.config.schema import DatasetConfig
from flexfleet.files import prepared
from flexfleet.files.artifacts import Apoz, PoolFile
from flexfleet.files.measure import Measure
from flexfleet.files.progress import recorded_warnings
from flexfleet.files.run_status import lines_of
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show, tags_of
from flexfleet.pipeline import enrollment, model_pool, partition, pretrain
from flexfleet.pipeline.central import central as train
from flexfleet.pipeline.check import check as examine
from flexfleet.pipeline.check import check_folders
from flexfleet.pipeline.forecast import forecast
from flexfleet.pipeline.gc import collect
from flexfleet.pipeline.prepare import config_of, resolved_of
from flexfleet.pipeline.resume import Attempt
from flexfleet.pipeline.run import run as run_all
from flexfleet.pipeline.status import describe, failures_of, list_runs, runs_in
from flexfleet.reports import precisions
from flexfleet.reports.finished_run import load, load_all
from flexfleet.reports.report import report as write_report
from flexfleet.reports.report import table
from flexfleet.tracking.server import check_address

log = logging.getLogger("flexfleet")


def run(args: argparse.Namespace) -> int:
    check_resume(args, "--run-id")
    resolved = resolved_of(args)
    config = resolved.config
    run_id = new_name(config) if args.run_id is None else args.run_id
    out = Path(config.run.store) / run_id
    result = run_all(resolved, run_id, _attempt(args), args.shared)
    if args.json:
        show(result.model_dump_json())
    else:
        show(table([load(out)]))
        if found := precisions.of_run(out, list(result.metrics["levels"]), result.model_sha256):
            show(precisions.table(found))
        show(f"report: {result.report}")
        show_tracked(config)
    return 0 if result.status == "finished" else Diverged.exit_code


def _attempt(args: argparse.Namespace) -> Attempt:
    return Attempt(args.resume, args.discard_damaged, args.accept_numerics, tags_of(args.tag))


def central(args: argparse.Namespace) -> None:
    check_resume(args, "--run-id")
    resolved = resolved_of(args)
    config = resolved.config
    run_id = dated(f"central-s{config.seed}") if args.run_id is None else args.run_id
    result = train(resolved, run_id, _attempt(args))
    if args.json:
        show(result.model_dump_json())
        return
    m, measure = result.metrics, Measure(resolved.data.task.metric.name)
    best = f"best {measure.with_unit(m['best']['full'])} after epoch {m['best']['round']}"
    show(f"{result.run_id}: {measure.name} {measure.with_unit(m['full'])} after {config.central.epochs} epochs, {best}")
    show(f"curve: {result.report}")
    show_tracked(config)


def pool(args: argparse.Namespace) -> None:
    resolved = resolved_of(args)
    config, algorithm = resolved.config, resolved.algorithm
    results: dict[str, Any] = {"apoz": Apoz.read(args.apoz)} if args.apoz else {}
    missing = [name for name in algorithm.preparations if name not in results]
    shape = _sample(args, config, needs_data=bool(missing))

    def no_server() -> NoReturn:
        raise ConfigError(f"the pool of {config.algorithm['name']} needs the server's data. Leave out --input")

    server = partition.server_of(resolved) if shape is None else ServerSite(no_server)
    if shape is not None:
        family, weights = resolved.network(*shape), {}
    else:
        family = resolved.family
        if missing:
            with stopping_at_once(), tempfile.TemporaryDirectory() as scratch:
                partition.partition(resolved, Path(scratch))
                pretrain.pretrain(resolved, Path(scratch), Path(scratch))
                results = {**prepared.read(Path(scratch), algorithm.preparations), **results}
        weights = resolved.start or weights_of(results)
    try:
        built = model_pool.build(config, algorithm, family, results, server, weights)
    except KeyError as error:
        if error.args[0] not in missing:
            raise
        raise ConfigError(
            f"the pool needs {error}, which must be measured on data. Leave out --input and --classes. For apoz, you "
            "can also use --apoz FILE (the apoz.json of a pretrain step) or --set algorithm.use_apoz=false"
        ) from error
    mean: dict[str, float] = {}
    if args.flops_as == "thop":
        built, mean = _as_in_table_3_6(built, family)
    if args.json:
        document = built.model_dump(mode="json")
        for level in document["levels"]:
            level["flops"] = level["macs"]  # The JSON output contains the value under two names.
        show(json.dumps({**document, "mean": mean} if mean else document))
        return
    outputs = f"{built.classes} output{'s' if built.classes > 1 else ''}"
    show(f"{built.algorithm} on {built.model}, {outputs}, input {'x'.join(map(str, built.input_chw))}")
    show(f"{'model':8}{'share %':>9}{'parameters':>13}{'MB':>9}{'M MACs':>12}  widths")
    for m in built.levels:
        widths = " ".join(str(w) for w in m.widths.values())
        sizes = f"{100 * m.share:9.2f}{m.params:13,}{m.bytes / 1e6:9.2f}{m.macs / 1e6:12.3f}"
        show(f"{m.name:8}{sizes}  {widths}")
    if mean:
        show(
            f"mean of the models sent: {mean['params'] / 1e6:.3f} M parameters, {mean['macs'] / 1e6:.3f} M MACs, "
            f"{mean['mib']:.2f} MB (of 2^20 bytes)"
        )


def _as_in_table_3_6(built: PoolFile, family: ModelFamily) -> tuple[PoolFile, dict[str, float]]:
    """Count the pool's multiply-adds as in FedRolex's Table 3.6; return the pool with these counts, and `means`.
    `means` contains the mean parameters, multiply-adds and size (MB of 2^20 bytes) of the models sent to clients."""
    levels = tuple(
        m.model_copy(update={"macs": count_macs(family, SubmodelSpec.from_json(m.spec), linear=2)})
        for m in built.levels
    )
    sent = [m for m in levels if m.dispatched]
    params, macs = fmean(m.params for m in sent), fmean(m.macs for m in sent)
    means = {"params": params, "macs": macs, "flops": macs, "mib": 4 * params / 2**20}
    return built.model_copy(update={"levels": levels}), means


def _sample(args: argparse.Namespace, config: Config, needs_data: bool) -> tuple[tuple[int, ...], int] | None:
    """Return the sample shape and the number of outputs, as given by --input and --classes or by the network's
    publication. Return None if these values can only be read from the data set."""
    if args.input is None and args.classes is None:
        kind = model_kind(config.model)
        is_named = "dataset.name" in args.set or config.dataset.name != DatasetConfig().name
        if isinstance(kind, PublishedFor) and not is_named and not needs_data:
            return kind.published_input, kind.published_outputs
        return None
    if args.input is None or args.classes is None:
        raise ConfigError("--input and --classes must be given together, because they replace a data set")
    if args.classes < 1:
        raise ConfigError(f"--classes must be at least 1, got {args.classes}", code="config.out_of_range")
    sides = args.input.split("x")
    if not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"--input must be a shape such as 3x32x32 or 18, got {args.input!r}")
    return tuple(map(int, sides)), args.classes


def check(args: argparse.Namespace) -> int:
    with recorded_warnings() as warnings:
        resolved = resolved_of(args)
        config = resolved.config
        check_folders(config)
        if args.connect and config.tracking.mlflow is not None:  # `connections` reports the server with all others
            check_address(config.tracking.mlflow)
            tracking = config.tracking.model_copy(update={"mlflow": None})
            resolved = replace(resolved, config=config.model_copy(update={"tracking": tracking}))
        facts = examine(resolved)
    if warnings and args.json:
        facts["warnings"] = [each.getMessage() for each in warnings]
    contacted = []
    if args.connect:
        contacted = connections(config)
        facts |= {"ok": all(each.ok for each in contacted), "connections": [asdict(each) for each in contacted]}
    hidden = ("ok", "connections")
    text = ["ok: " + ", ".join(f"{k} {v}" for k, v in facts.items() if k not in hidden), *map(str, contacted)]
    if not args.json:
        with suppress(Exception):  # a check does not need a forecast, and the user's code may raise any exception
            figures = forecast(resolved, seconds=0.5).figures.items()
            named = (f"{name} {each['value']:.4g}" for name, each in figures)
            text.insert(1, f"forecast: {', '.join(named)}")
    show(json.dumps(facts) if args.json else "\n".join(text))
    return 0 if facts["ok"] else EnvironmentFailure.exit_code


def report(args: argparse.Namespace) -> None:
    with stopping_at_once():
        loaded = load_all(args.runs)
        for run in args.runs:
            if not (run / "result.json").is_file():
                raise IntegrityError(f"{run} has no result.json. Finish the run with `flexfleet run --resume`")
        page = write_report(loaded, args.out)
    if args.json:
        show(json.dumps({"report": str(page), "runs": [str(r) for r in args.runs]}))
    else:
        show(table(loaded))
        show(f"report: {page}")


def status(args: argparse.Namespace) -> None:
    if args.failures:
        if args.run is None:
            raise ConfigError("--failures needs RUN, the folder of a run", code="config.missing")
        _show_failures(failures_of(args.run), args.json)
        return
    config = config_of(args) if args.run is None else None
    rows = runs_in(args.run) if config is None else list_runs(Path(config.run.store))
    is_one_run = config is None and not rows
    if is_one_run:
        rows = [describe(args.run)]
    devices = [] if config is None else _invited(config)
    if args.json:
        about = {"runs": rows, "agents": devices} if devices else {"runs": rows}
        show(json.dumps(rows[0] if is_one_run else about))
        return
    if config is not None and not rows:
        show(f"{config.run.store} does not contain a run yet")
    longest = max([40, *(len(row["run_id"]) for row in rows)])
    for row in rows:
        measure, last = Measure(row["metric"] or ""), ""
        if row["avg"] is not None:
            last = f"  avg {measure.with_unit(row['avg'])}  full {measure.with_unit(row['full'])}"
        text = row["why"] if "why" in row else f"round {row['round']}/{row['stop']}{last}"
        show(f"{row['run_id']:{longest}} {row['status']:14} {text}")
    for each in devices:
        last = f", last {each['last']}" if each["last"] else ""
        seen = f" seen {each['seen']}" if each["seen"] else ""
        error = f": {each['said']}" if each["said"] else ""
        show(f"{each['name']:20} {each['state']:10}{seen}  {each['answers']} results, {each['lost']} lost{last}{error}")


def _show_failures(failures: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        show(json.dumps({"failures": failures}))
        return
    if not failures:
        show("no update failed")
    for each in failures:
        first, *more = lines_of(each)
        show("\n  ".join([f"{each['count']} update{'s' if each['count'] > 1 else ''}: {first}", *more]))


def gc(args: argparse.Namespace) -> None:
    with stopping_at_once():
        found = collect(config_of(args), args.keep, args.dry_run)
    if args.json:
        show(json.dumps(found))
        return
    for row in found["entries"]:
        show(f"{row['name']:40} {row['kind']:10} {row['bytes'] / 1e6:10.2f} MB")
    for name, why in found["kept"].items():
        show(f"{name:40} kept: {why}")
    show(f"{'would delete' if args.dry_run else 'deleted'} {found['bytes'] / 1e6:.2f} MB")


def _invited(config: Config) -> list[dict[str, Any]]:
    """Return the invited devices. If an error occurs, log it and return an empty list, so that runs are still shown."""
    try:
        return enrollment.status(config)
    except FlexfleetError as error:
        log.warning("cannot list the invited devices: %s", error)
        return []


def check_resume(args: argparse.Namespace, option: str) -> None:
    """Raise ConfigError if `--resume` is set without the option `option`, which names the folder to resume."""
    if args.resume and getattr(args, option[2:].replace("-", "_")) is None:
        raise ConfigError(f"--resume needs {option}, the name of the folder to resume", code="config.missing")


def show_tracked(config: Config) -> None:
    """Print the address of the MLflow server, or the command that starts a server for a local tracking database."""
    if uri := config.tracking.mlflow:
        show(f"MLflow: {'' if uri.startswith('http') else 'mlflow ui --backend-store-uri '}{masked(uri)}")

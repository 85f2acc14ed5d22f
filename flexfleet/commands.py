"""What each command of the console does: it reads its arguments, calls the package, and prints a table or JSON."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

from fl_engine.core.errors import ConfigError, FlexfleetError, masked
from fl_engine.core.system import seldom_collected
from flexfleet.files.terminal import show

log = logging.getLogger("flexfleet")

if TYPE_CHECKING:
    from fl_engine.core.contracts import ModelFamily
    from flexfleet.config import Config
    from flexfleet.files.artifacts import PoolFile

MLFLOW_RUN = re.compile(r"[0-9a-f]{32}")


def run(args: argparse.Namespace) -> int:
    from flexfleet.config.names import new_name
    from flexfleet.runs.whole import run as run_all
    from flexfleet.steps.prepare import resolved_of

    _resumes_by_name(args)
    resolved = resolved_of(args)
    config = resolved.config
    run_id = new_name(config) if args.run_id is None else args.run_id
    result = run_all(
        resolved,
        run_id,
        resume=args.resume,
        discard_damaged=args.discard_damaged,
        accept_numerics=args.accept_numerics,
        shared=args.shared,
        tags=tags_of(args.tag),
    )
    if args.json:
        print(result.model_dump_json())
    else:
        from flexfleet.reports import precisions
        from flexfleet.reports.report import table

        out = Path(config.run.store) / run_id
        print(table([out]))
        if found := precisions.of_run(out, list(result.metrics["levels"]), result.model_sha256):
            print(precisions.table(found))
        print(f"report: {result.report}")
        if config.tracking.mlflow:
            print(where_tracked(config.tracking.mlflow, config.tracking.ui))
    return 0


def _resumes_by_name(args: argparse.Namespace) -> None:
    if args.resume and args.run_id is None:
        raise ConfigError("--resume needs --run-id: the name of the run to go on with, a folder of the run store")


def central(args: argparse.Namespace) -> int:
    from flexfleet.runs.central import central as train
    from flexfleet.steps.prepare import resolved_of

    _resumes_by_name(args)
    resolved = resolved_of(args)
    config = resolved.config
    named = f"central-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    result = train(
        resolved,
        named if args.run_id is None else args.run_id,
        resume=args.resume,
        discard_damaged=args.discard_damaged,
        accept_numerics=args.accept_numerics,
        tags=tags_of(args.tag),
    )
    if args.json:
        print(result.model_dump_json())
        return 0
    from flexfleet.files.measure import Measure

    m, measure = result.metrics, Measure(resolved.data.task.metric.name)
    best = f"best {measure.with_unit(m['best']['full'])} after epoch {m['best']['round']}"
    print(
        f"{result.run_id}: {measure.name} {measure.with_unit(m['full'])} after {config.central.epochs} epochs, {best}"
    )
    print(f"curve: {result.report}")
    if config.tracking.mlflow:
        print(where_tracked(config.tracking.mlflow, config.tracking.ui))
    return 0


def where_tracked(uri: str, ui: str | None) -> str:
    """Where to see the run in MLflow: the server's address, or the command that starts a server for a database."""
    if ui is not None or uri.startswith(("http://", "https://")):
        return f"MLflow: {masked(ui or uri)}"
    return f"MLflow: mlflow ui --backend-store-uri {masked(uri)}"


def compare(args: argparse.Namespace) -> int:
    from flexfleet.comparisons import suites
    from flexfleet.config import entries, load_config
    from flexfleet.config.entries import Entry
    from flexfleet.steps.prepare import config_of

    if args.suites:
        return list_suites(args)
    if args.resume and args.id is None:
        raise ConfigError("--resume needs --id: the name of the comparison to go on with, a folder of the run store")

    def load(sets: list[str]) -> Config:
        return config_of(argparse.Namespace(config=args.config, set=sets))

    to = () if args.to is None else entries.accuracies_of(args.to)
    name = time.strftime("compare-%Y%m%d-%H%M%S") if args.id is None else args.id
    references: list[Entry] = []
    if args.suite is not None:
        suite, read = suites.load(args.suite), partial(load_config, args.config)
        to = to or suite.to
        runs = suites.entries_of(suite, args.algorithms, args.seeds, args.set, read, name, args.over)
        references = [] if args.central else suites.central_of(suite, args.algorithms, args.seeds, args.set, read, name)
    elif args.algorithms is not None:
        runs = entries.entries_for(args.algorithms, args.seeds, args.set, load, name, args.over)
    else:
        raise ConfigError("compare needs --algorithms, e.g. --algorithms flexfl,all_large, or --suite")

    from flexfleet.comparisons.tabulate import text as table
    from flexfleet.comparisons.whole import compare as compare_all

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
        print(comparison.model_dump_json())
    else:
        print(table(comparison))
        print(f"page: {entries.folder_of(runs) / 'comparison.html'}")
        if runs[0].config.tracking.mlflow:
            print(where_tracked(runs[0].config.tracking.mlflow, runs[0].config.tracking.ui))
    return 0


def list_suites(args: argparse.Namespace) -> int:
    """Prints the suites that come with flexfleet: a small one below the one that it stands for."""
    from dataclasses import asdict

    from flexfleet.comparisons import suites

    found = {one.name: one for one in suites.listed()}
    if args.json:
        print(json.dumps({"suites": [asdict(one) for one in found.values()]}))
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
    from flexfleet.steps.prepare import config_of

    if args.resume and args.id is None:
        raise ConfigError("--resume needs --id: the name of the study to go on with, a folder of the run store")
    if args.jobs is not None:
        args.set = [*args.set, f"tune.workers={args.jobs}"]
    name = time.strftime("tune-%Y%m%d-%H%M%S") if args.id is None else args.id
    config = config_of(args)

    from flexfleet.studies.outcome import told
    from flexfleet.studies.study import tune as search

    tuned = search(config, name, resume=args.resume)
    print(tuned.model_dump_json() if args.json else told(tuned, Path(config.run.store) / name))
    return 0


def regress(args: argparse.Namespace) -> int:
    from fl_engine.core.errors import GateFailed
    from flexfleet.comparisons.whole import check_jobs
    from flexfleet.nightly import regress as step
    from flexfleet.nightly import webhook

    id = time.strftime("night-%Y%m%d-%H%M%S") if args.id is None else args.id
    check_jobs(args.jobs)
    night = step.prepare(args.suite, id, args.set, args.update)
    log.info("folder: %s", night.folder)
    if args.update:
        figures = step.update(night, jobs=args.jobs, resume=args.resume)
        print(figures.model_dump_json() if args.json else f"reference: {night.path.with_suffix('.json')}")
        return 0
    verdict = step.regress(night, jobs=args.jobs, resume=args.resume)
    print(verdict.model_dump_json() if args.json else step.told(verdict))
    if not verdict.passed:
        webhook.call(step.told(verdict))
    return 0 if verdict.passed else GateFailed.exit_code


def submit(args: argparse.Namespace) -> int:
    from flexfleet.steps.prepare import config_of

    if (args.pipeline is None) == (args.follow is None):
        raise ConfigError("submit takes the name of a pipeline to start, or --follow RUN_ID, one of the two")
    if args.follow is not None:
        return follow(args, args.follow, {})
    from dataclasses import asdict

    from flexfleet.config import pair_of
    from flexfleet.kubeflow.submit import given
    from flexfleet.kubeflow.submit import submit as start

    own = fields_of(args.param)
    submitted = start(
        args.pipeline,
        given(args.pipeline, config_of(args), [pair_of(text)[0] for text in args.set]) | own,
        host=args.host,
        namespace=args.namespace,
        experiment=args.experiment,
        run_name=args.run_name,
    )
    if args.wait or not args.json:
        said = f"{submitted.pipeline} {submitted.version}{' (new)' if submitted.uploaded else ''}"
        where = "" if args.wait else f": {submitted.url or submitted.run_id}"  # which following begins with
        print(said + where, file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.wait:
        return follow(args, submitted.run_id, asdict(submitted))
    print(json.dumps(asdict(submitted)) if args.json else f"to follow it: {_follow_again(args, submitted.run_id)}")
    return 0


def _follow_again(args: argparse.Namespace, run_id: str) -> str:
    return f"flexfleet submit --follow {run_id}" + (f" --host {masked(args.host)}" if args.host else "")


def follow(args: argparse.Namespace, run_id: str, about: dict[str, object]) -> int:
    """`about`: what is already known about the run, for --json. Ctrl-C stops following, not the run."""
    from dataclasses import asdict

    from fl_engine.core.errors import FlexfleetError
    from flexfleet.kubeflow.follow import follow as watch

    again = f"to follow it again: {_follow_again(args, run_id)}"
    out = sys.stderr if args.json else sys.stdout
    try:
        followed = watch(run_id, host=args.host, tell=lambda line: print(line, file=out, flush=True))
    except KeyboardInterrupt:
        print(f"not followed any more; the run goes on. {again[0].upper()}{again[1:]}", file=sys.stderr)
        return 130
    except FlexfleetError as error:
        raise type(error)(f"{error}. {again[0].upper()}{again[1:]}") from error
    if args.json:
        print(json.dumps({**about, **asdict(followed)}))
    return followed.exit_code


def nightly(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from flexfleet.config.overrides import form_of
    from flexfleet.kubeflow.submit import schedule
    from flexfleet.nightly.regress import prepare

    parameters = {"suite": args.suite, **form_of(args.set), **fields_of(args.param)}
    prepare(args.suite, "nightly", [*args.set, "tracking.mlflow=null"])  # an error now, not at night
    scheduled = schedule(
        "nightly",
        parameters,
        args.name,
        args.cron,
        host=args.host,
        namespace=args.namespace,
        experiment=args.experiment,
    )
    if args.json:
        print(json.dumps(asdict(scheduled)))
    else:
        before = f", in place of {scheduled.replaced}" if scheduled.replaced else ""
        print(f"{scheduled.name} at {scheduled.cron!r} (UTC){before}: {scheduled.url or scheduled.recurring_run_id}")
    return 0


def fields_of(texts: Sequence[str]) -> dict[str, str]:
    """The values of --param."""
    found = tags_of(texts, "--param")
    if "advanced" in found:
        raise ConfigError("--param advanced: give each of its values with --set a.b=value")
    return found


def tags_of(texts: Sequence[str], option: str = "--tag") -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    wrong = [text for text, (key, sign, _) in zip(texts, pairs, strict=True) if not key or not sign]
    if wrong:
        raise ConfigError(f"{option} takes key=value, got {wrong[0]!r}")
    return {key: value for key, _, value in pairs}


def pool(args: argparse.Namespace) -> int:
    from fl_engine.exchange.server import LazyServer
    from fl_engine.preparation.weights import given as weights_of
    from flexfleet.files import prepared
    from flexfleet.files.artifacts import Apoz
    from flexfleet.steps import model_pool, partition, pretrain
    from flexfleet.steps.prepare import resolved_of

    resolved = resolved_of(args)
    config, algorithm = resolved.config, resolved.algorithm
    made: Mapping[str, Any] = {"apoz": Apoz.read(args.apoz)} if args.apoz else {}
    missing = [name for name in algorithm.preparations if name not in made]
    given = _stand_in(args, config, needs_data=bool(missing))
    family = resolved.network(*given) if given else resolved.family
    if missing and given:
        made = _Unprepared(made)
    elif missing:
        with tempfile.TemporaryDirectory() as scratch:
            partition.partition(resolved, Path(scratch))
            pretrain.pretrain(resolved, Path(scratch), Path(scratch))
            made = {**prepared.read(Path(scratch), algorithm.preparations), **made}

    def no_server() -> NoReturn:
        raise ConfigError(
            f"the pool of {config.algorithm['name']} asks for the server's data, and there is no data set here: leave "
            "out --input and --classes, and name one (--set dataset.name=NAME)"
        )

    server = LazyServer(no_server) if given else partition.server_of(resolved)
    weights = {} if given else resolved.start or weights_of(made)
    built = model_pool.build(config, algorithm, family, made, server, weights)
    mean: dict[str, float] = {}
    if args.flops_as == "thop":
        built, mean = _as_in_table_3_6(built, family)
    if args.json:
        print(json.dumps({**built.model_dump(mode="json"), "mean": mean}) if mean else built.model_dump_json())
        return 0
    outputs = f"{built.classes} output{'s' if built.classes > 1 else ''}"
    print(f"{built.algorithm} on {built.model}, {outputs}, input {'x'.join(map(str, built.input_chw))}")
    print(f"{'model':8}{'share %':>9}{'parameters':>13}{'MB':>9}{'MFLOPs':>10}  widths")
    for m in built.levels:
        widths = " ".join(str(w) for w in m.widths.values())
        flops = f"{m.flops / 1e6:11.6f}" if mean else f"{m.flops / 1e6:10.2f}"
        print(f"{m.name:8}{100 * m.share:9.2f}{m.params:13,}{m.bytes / 1e6:9.2f}{flops}  {widths}")
    if mean:
        print(
            f"mean of the models sent: {mean['params'] / 1e6:.3f} M parameters, {mean['flops'] / 1e6:.3f} M FLOPs, "
            f"{mean['mib']:.2f} MB (of 2^20 bytes)"
        )
    return 0


def _as_in_table_3_6(built: PoolFile, family: ModelFamily) -> tuple[PoolFile, dict[str, float]]:
    """The pool with FLOPs as in FedRolex's Table 3.6, and the means that are its columns: over the models sent, the
    parameters, the FLOPs, and the size in MB of 2^20 bytes (`mib`), 4 bytes a parameter."""
    from fl_engine.core.slicing import count_macs
    from fl_engine.core.types import SubmodelSpec

    levels = tuple(
        m.model_copy(update={"flops": count_macs(family, SubmodelSpec.from_json(m.spec), linear=2)})
        for m in built.levels
    )
    sent = [m for m in levels if m.dispatched]
    params, flops = (fmean(getattr(m, name) for m in sent) for name in ("params", "flops"))
    return built.model_copy(update={"levels": levels}), {"params": params, "flops": flops, "mib": 4 * params / 2**20}


class _Unprepared(dict[str, Any]):
    """What preparations made, where one takes data that are not there: an algorithm that can list its sub-models
    without it asks by `get`."""

    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"the pool asks for {name}, which takes data: leave out --input and --classes (or for apoz "
            "give --apoz FILE, a pretrain step's apoz.json, or --set algorithm.use_apoz=false)"
        )


def _stand_in(args: argparse.Namespace, config: Config, needs_data: bool) -> tuple[tuple[int, ...], int] | None:
    """The shape of a sample and the number of outputs, where `pool` needs no data set: those of --input and --classes,
    or those that the network was published for, unless a data set is asked for: by --set, or another one than the
    default by a file."""
    from fl_engine.core.contracts import PublishedFor
    from fl_engine.models.build import model_kind
    from flexfleet.config.schema import DatasetConfig
    from flexfleet.steps.prepare import parse_input

    if args.input is None and args.classes is None:
        kind = model_kind(config.model)
        set_here = any(each.startswith("dataset.name=") for each in args.set)
        named = set_here or config.dataset.name != DatasetConfig().name
        if isinstance(kind, PublishedFor) and not named and not needs_data:
            return kind.published_input, kind.published_outputs
        return None
    if args.input is None or args.classes is None:
        raise ConfigError("--input and --classes go together: they stand in for a data set")
    if args.classes < 1:
        raise ConfigError(f"--classes says how many outputs the network has, at least 1; got {args.classes}")
    return parse_input(args.input), args.classes


def report(args: argparse.Namespace) -> int:
    with seldom_collected():
        from flexfleet.reports.report import load_all, report_of, table_of

        loaded = load_all(args.runs)
        page = report_of(loaded, args.out)
    if args.json:
        print(json.dumps({"report": str(page), "runs": [str(r) for r in args.runs]}))
    else:
        print(table_of(loaded))
        print(f"report: {page}")
    return 0


def fetch(args: argparse.Namespace) -> int:
    if len(args.names) == 1 and MLFLOW_RUN.fullmatch(args.names[0]):
        return fetch_run(args)
    from fl_engine.core.registry import resolve
    from fl_engine.datasets import DATASETS, data_root

    root = data_root(args.root)
    named = {name: resolve(DATASETS, name, "data set") for name in args.names}
    for source in named.values():
        if source.fetch is not None:
            source.fetch(root)
        source.load(root)
    listed = named or dict(sorted(DATASETS.items()))
    there = {name: not source.missing(root) for name, source in listed.items()}
    if args.json:
        about = {name: source.about for name, source in listed.items()}
        addresses = {name: source.address for name, source in listed.items()}
        print(json.dumps({"root": str(root), "datasets": there, "about": about, "source": addresses}))
        return 0
    for name, source in listed.items():
        fetched = "nothing to fetch, checked" if source.fetch is None else "complete and checked"
        line = "; ".join(filter(None, (source.about, source.address)))
        print(f"{name:16} {fetched if named else source.on_disk(root):12} {line}")
    return 0


def fetch_run(args: argparse.Namespace) -> int:
    from flexfleet.steps.prepare import config_of
    from flexfleet.tracking.versioned import fetch_run as bring

    config = config_of(args)
    if config.tracking.mlflow is None:
        raise ConfigError(f"{args.names[0]} is looked up in MLflow, and tracking.mlflow is null")
    out = args.out or Path(config.run.store) / args.names[0]
    brought = bring(config.tracking.mlflow, args.names[0], out)
    if args.json:
        print(json.dumps({"folder": str(out), "files": [str(path) for path in brought]}))
    else:
        print("\n".join(f"{path}  checked" for path in brought))
    return 0


def status(args: argparse.Namespace) -> int:
    from flexfleet.files.measure import Measure
    from flexfleet.runs.status import describe, list_runs
    from flexfleet.steps.prepare import config_of

    if args.run is not None:
        rows, config = [describe(args.run)], None
    else:
        config = config_of(args)
        rows = list_runs(Path(config.run.store))
        if not rows and not args.json:
            print(f"{config.run.store} holds no run yet")
    if not args.json:
        for row in rows:
            if "why" in row:
                print(f"{row['run_id']:40} {row['status']:10} {row['why']}", flush=True)
                continue
            measure, last = Measure(row["metric"] or ""), ""
            if row["avg"] is not None:
                last = f"  avg {measure.with_unit(row['avg'])}  full {measure.with_unit(row['full'])}"
            print(f"{row['run_id']:40} {row['status']:10} round {row['round']}/{row['stop']}{last}", flush=True)
    devices = [] if config is None else _invited(config)
    if args.json:
        about = {"runs": rows, "agents": devices} if devices else {"runs": rows}
        print(json.dumps(rows[0] if args.run is not None else about))
        return 0
    for each in devices:
        did = f"{each['answers']} answered, {each['lost']} lost{', last ' + each['last'] if each['last'] else ''}"
        seen = f" seen {each['seen']}" if each["seen"] else ""
        print(f"{each['name']:20} {each['state']:10}{seen}  {did}")
    return 0


def _invited(config: Config) -> list[dict[str, Any]]:
    """The invited devices; none where it cannot be said, which is no failure of a list of runs."""
    from flexfleet.steps import invitations

    try:
        return invitations.told(config)
    except FlexfleetError as error:
        log.warning("which devices are invited cannot be said: %s", error)
        return []


def invite(args: argparse.Namespace) -> int:
    from flexfleet.steps import invitations
    from flexfleet.steps.prepare import config_of

    config = config_of(args)
    if args.revoke is not None:
        invitations.revoke(config, args.revoke)
        print(json.dumps({"revoked": args.revoke}) if args.json else f"{args.revoke} gets no orders any more")
        return 0
    written = [str(path) for path in invitations.invite(config, args.tier, args.count, args.out)]
    if args.json:
        print(json.dumps({"invitations": written}))
        return 0
    print("\n".join(written))
    print("each is one device: whoever has the file is the device. On it: flexfleet agent --invite FILE")
    return 0


def agent(args: argparse.Namespace) -> int:
    from flexfleet.steps.agent import run as serve

    return serve(args)


def profile(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from flexfleet.runs import profile as device
    from flexfleet.steps.agent_line import invitation_of
    from flexfleet.steps.prepare import resolved_of

    found = device.profile(
        resolved_of(args),
        None if args.invite is None else invitation_of(args.invite),
        name=args.tier,
        share=args.share,
        room=None if args.memory is None else args.memory * 1e6,
        seconds=args.seconds,
    )
    text = device.text(found)
    if args.out is not None:
        args.out.write_text(text)
    print(json.dumps(asdict(found)) if args.json else text.rstrip())
    return 0


def check(args: argparse.Namespace) -> int:
    from flexfleet.runs.check import check as examine
    from flexfleet.steps.prepare import resolved_of

    answer = examine(resolved_of(args))
    print(json.dumps(answer) if args.json else "ok: " + ", ".join(f"{k} {v}" for k, v in answer.items() if k != "ok"))
    return 0


def doctor(args: argparse.Namespace) -> int:
    from flexfleet.files.doctor import examine

    report = examine(args.measure)
    if args.json:
        print(json.dumps(report))
        return 0
    print(
        f"flexfleet {report['version']}, Python {report['python']}, {report['cpus']} CPUs, torch devices: "
        f"{', '.join(report['devices']) or 'none'}"
    )
    for extra, about in report["extras"].items():
        missing = ", ".join(about["missing"])
        state = f"missing {missing}: pip install 'flexfleet[{extra}]'" if missing else "installed"
        print(f"  {extra:10} {state}\n             {about['enables']}")
    if args.measure:
        from flexfleet.files.half_speed import said

        print(f"  the processor multiplies bfloat16 with: {', '.join(report['cpu_bf16']) or 'nothing of its own'}")
        for device, seconds in report["seconds_a_step"].items():
            for line in said(seconds):
                print(f"  {line} ({device}: a step of McMahan's CNN, {1e3 * seconds['fp32']:.1f} ms in fp32)")
    for name, there in report["data"].items():
        print(f"  data {name:14} {'there' if there else 'not there'}")
    return 0

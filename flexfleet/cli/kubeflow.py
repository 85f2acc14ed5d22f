"""Commands for Kubeflow: submit, export-pipeline and nightly."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

from fl_engine.core.errors import BadInput, ConfigError, FlexfleetError, Interrupted, Stopped, masked
from flexfleet.config.dotted import FIELDS, Overrides, check_once
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show, tags_of
from flexfleet.kubeflow.client import connected
from flexfleet.kubeflow.follow import RETRIES, log_lines, retry
from flexfleet.kubeflow.follow import follow as follow_run


def submit(args: argparse.Namespace) -> int:
    if args.pipeline is not None:
        return _start(args)
    if args.dry_run:
        raise BadInput("--dry-run requires the name of a pipeline, such as `flexfleet submit train --dry-run`")
    if args.follow is not None:
        return follow(args, args.follow)
    run_id = args.logs or args.retry or args.terminate
    with connected(args.host) as client:
        if args.logs is not None:
            text = "\n".join(log_lines(client, run_id))
            show(json.dumps({"run_id": run_id, "logs": text}) if args.json else text)
            return 0
        if args.retry is not None:
            retry(client, run_id)
            message = f"the failed tasks of run {run_id} restart. To follow the run: {_follow_command(args, run_id)}"
        else:
            client.terminate_run(run_id)
            message = f"terminating run {run_id}, whose committed rounds are kept"
    if args.wait:
        return follow(args, run_id)
    show(json.dumps({"run_id": run_id}) if args.json else message)
    return 0


def _start(args: argparse.Namespace) -> int:
    from flexfleet.config import load_config
    from flexfleet.kubeflow.submit import given, read
    from flexfleet.kubeflow.submit import submit as start
    from flexfleet.pipeline.prepare import config_of

    fields = read(args.pipeline, fields_of(args.param, args.set))
    label_overrides: Overrides = {}
    if args.pipeline == "compare":  # `config_of` does not support `label:a.b=value`.
        label_overrides = {path: value for path, value in args.set.items() if ":" in path}
    overrides = {path: value for path, value in args.set.items() if path not in label_overrides}
    if args.pipeline != "nightly":
        config = config_of(argparse.Namespace(**{**vars(args), "set": overrides}))
    elif args.config:
        raise ConfigError("--config cannot be used with nightly, because the suite sets the configuration")
    else:
        config = load_config(None, overrides)
    values = given(args.pipeline, config, overrides)
    values |= {"advanced": values["advanced"] | label_overrides} | fields
    if args.dry_run:
        return _show_dry_run(args, values)
    submitted = start(
        args.pipeline,
        values,
        host=args.host,
        namespace=args.namespace,
        experiment=args.experiment,
        run_name=args.run_name,
    )
    if args.wait or not args.json:
        message = f"{submitted.pipeline} {submitted.version}{' (new)' if submitted.uploaded else ''}"
        where = "" if args.wait else f": {submitted.url or submitted.run_id}"  # follow() prints the address
        _printer(args)(message + where)
    if args.wait:
        return follow(args, submitted.run_id, asdict(submitted), retries=RETRIES)
    command = _follow_command(args, submitted.run_id)
    show(json.dumps(asdict(submitted)) if args.json else f"to follow the run: {command}")
    return 0


def _show_dry_run(args: argparse.Namespace, values: Mapping[str, Any]) -> int:
    """Print the pipeline that `submit` would upload, and the parameters of the run that it would start."""
    from flexfleet.kubeflow.submit import checked

    text, version, parameters = checked(args.pipeline, values)
    if args.json:
        about = {"pipeline": args.pipeline, "version": version, "parameters": parameters, "yaml": text}
        show(json.dumps(about))
        return 0
    show(text.rstrip("\n"))
    print(f"{args.pipeline} {version}, not submitted; parameters: {json.dumps(parameters)}", file=sys.stderr)
    return 0


def export_pipeline(args: argparse.Namespace) -> None:
    from flexfleet.kubeflow.submit import exported

    text, version = exported(args.pipeline)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    if args.json:
        where = {"yaml": text} if args.out is None else {"out": str(args.out)}
        show(json.dumps({"pipeline": args.pipeline, "version": version, **where}))
    else:
        show(text.rstrip("\n") if args.out is None else f"{args.pipeline} {version}: {args.out}")


def _printer(args: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line to stderr if --json is given, otherwise to stdout."""
    return partial(print, file=sys.stderr, flush=True) if args.json else show


def _follow_command(args: argparse.Namespace, run_id: str) -> str:
    return f"flexfleet submit --follow {run_id}" + (f" --host {masked(args.host)}" if args.host else "")


def follow(
    args: argparse.Namespace, run_id: str, about: Mapping[str, object] = MappingProxyType({}), retries: int = 0
) -> int:
    """Print the progress of a run until the run ends. Ctrl-C and SIGTERM stop this command, but not the run. `about`
    contains values that are added to the JSON output."""
    again = f"To follow the run again: {_follow_command(args, run_id)}"
    try:
        with stopping_at_once():
            followed = follow_run(run_id, host=args.host, retries=retries, report=_printer(args))
    except (KeyboardInterrupt, Stopped) as stopped:
        ended = Interrupted(f"stopped following the run, which continues. {again}")
        if isinstance(stopped, Stopped):  # The exit code must not be 3, which means that the run was terminated.
            ended.exit_code = 143
        raise ended from None
    except FlexfleetError as error:
        raise type(error)(f"{error}. {again}") from error
    if args.json:
        show(json.dumps({**about, **asdict(followed)}))
    return followed.exit_code


def nightly(args: argparse.Namespace) -> None:
    from flexfleet.config import load_config
    from flexfleet.kubeflow.submit import given, read, schedule

    fields = fields_of(args.param, args.set)
    if "suite" in fields:
        raise ConfigError("--param cannot set suite. Use --suite NAME", path="suite")
    scheduled = schedule(
        "nightly",
        {"suite": args.suite, **given("nightly", load_config(None, args.set), args.set), **read("nightly", fields)},
        args.name,
        args.cron,
        host=args.host,
        namespace=args.namespace,
        experiment=args.experiment,
    )
    state = "new" if scheduled.made else "unchanged"
    state += f", disabled {scheduled.replaced} older" if scheduled.replaced else ""
    text = f"{scheduled.name} at {scheduled.cron!r} (UTC), {state}: {scheduled.url or scheduled.recurring_run_id}"
    show(json.dumps(asdict(scheduled)) if args.json else text)


def fields_of(texts: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, str]:
    """Parse the --param options into {field: value}. Raises ConfigError if --param and --set set a field twice."""
    values = tags_of(texts, "--param")
    if "advanced" in values:
        raise ConfigError("--param cannot set advanced. Use --set a.b=value for each parameter", path="advanced")
    fields = [(f"--param {name}", {path: None}) for path, name in FIELDS.items() if name in values]
    check_once([*fields, ("--set", overrides)])
    return values

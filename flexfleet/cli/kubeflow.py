"""The commands for Kubeflow: submit and nightly."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, Stopped, masked
from flexfleet.cli.runs import tags_of
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from flexfleet.config import Config, Overrides


def submit(args: argparse.Namespace) -> int:
    actions = {"follow": follow, "terminate": _terminate, "retry": _retry, "logs": _logs}
    given = [name for name in ("pipeline", *actions) if getattr(args, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            "submit takes the name of a pipeline to start, or one of --follow, --terminate, --retry and --logs with "
            f"the id of a run; got {', '.join(given) or 'none of them'}"
        )
    (chosen,) = given
    return _start(args) if chosen == "pipeline" else actions[chosen](args, getattr(args, chosen))


def _terminate(args: argparse.Namespace, run_id: str) -> int:
    from flexfleet.kubeflow.follow import terminate

    return _called(args, run_id, terminate, f"run {run_id} is being terminated; its committed rounds stay")


def _retry(args: argparse.Namespace, run_id: str) -> int:
    from flexfleet.kubeflow.follow import retry

    said = f"the failed tasks of run {run_id} are started again. To follow it: {_again(args, run_id)}"
    return _called(args, run_id, retry, said)


def _called(args: argparse.Namespace, run_id: str, call: Callable[[Any, str], None], said: str) -> int:
    from flexfleet.kubeflow.client import connected

    with connected(args.host) as client:
        call(client, run_id)
    if args.wait:
        return follow(args, run_id)
    show(json.dumps({"run_id": run_id}) if args.json else said)
    return 0


def _logs(args: argparse.Namespace, run_id: str) -> int:
    from flexfleet.kubeflow.client import connected
    from flexfleet.kubeflow.follow import print_logs

    lines: list[str] = []
    with connected(args.host) as client:
        found = print_logs(client, run_id, lines.append)
    if not found:
        raise EnvironmentFailure(f"Kubeflow has no logs of run {run_id}: no task has started, or its pods are deleted")
    show(json.dumps({"run_id": run_id, "logs": "\n".join(lines)}) if args.json else "\n".join(lines))
    return 0


def _start(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from flexfleet.kubeflow.follow import RETRIES
    from flexfleet.kubeflow.submit import given, read
    from flexfleet.kubeflow.submit import submit as start

    own = read(args.pipeline, fields_of(args.param, args.set))
    of_labels: Overrides = {}
    if args.pipeline == "compare":  # `label:a.b=value` sets a parameter of one label; a configuration has no labels
        of_labels = {path: value for path, value in args.set.items() if ":" in path}
    overrides = {path: value for path, value in args.set.items() if path not in of_labels}
    values = given(args.pipeline, _config_of(args, overrides), overrides)
    submitted = start(
        args.pipeline,
        values | {"advanced": values["advanced"] | of_labels} | own,
        host=args.host,
        namespace=args.namespace,
        experiment=args.experiment,
        run_name=args.run_name,
        key=args.key,
    )
    if args.wait or not args.json:
        said = f"{submitted.pipeline} {submitted.version}{' (new)' if submitted.uploaded else ''}"
        said += "" if submitted.started else f", which the key {submitted.key} has started before"
        where = "" if args.wait else f": {submitted.url or submitted.run_id}"  # follow() prints it
        _printer(args)(said + where)
    if args.wait:
        return follow(args, submitted.run_id, asdict(submitted), retries=RETRIES)
    show(json.dumps(asdict(submitted)) if args.json else f"to follow it: {_again(args, submitted.run_id)}")
    return 0


def _config_of(args: argparse.Namespace, overrides: Overrides) -> Config:
    """Return the configuration of a submission. A nightly regression run reads no file, because its suite sets the
    configuration. Raises ConfigError."""
    from flexfleet.config import load_config
    from flexfleet.pipeline.prepare import config_of

    if args.pipeline != "nightly":
        return config_of(argparse.Namespace(**{**vars(args), "set": overrides}))
    if args.config:
        raise ConfigError(
            "--config cannot be used with nightly, because the suite sets the configuration; leave it out"
        )
    return load_config(None, overrides)


def _printer(args: argparse.Namespace) -> Callable[[str], None]:
    """Return the function that prints a line: to stderr if --json is given, otherwise to stdout."""
    return partial(print, file=sys.stderr, flush=True) if args.json else show


def _again(args: argparse.Namespace, run_id: str) -> str:
    return f"flexfleet submit --follow {run_id}" + (f" --host {masked(args.host)}" if args.host else "")


def follow(
    args: argparse.Namespace, run_id: str, about: Mapping[str, object] = MappingProxyType({}), retries: int = 0
) -> int:
    """Follow a run to its end. Ctrl-C and SIGTERM stop following, not the run. `about`: what is known about the run,
    for --json."""
    from dataclasses import asdict

    from flexfleet.kubeflow.follow import follow as watch

    again = f"To follow it again: {_again(args, run_id)}"
    try:
        with stopping_at_once():
            followed = watch(run_id, host=args.host, retries=retries, report=_printer(args))
    except (KeyboardInterrupt, Stopped) as stopped:
        print(f"no longer following; the run continues. {again}", file=sys.stderr)
        return 143 if isinstance(stopped, Stopped) else 130  # 3 would say that the run was terminated
    except FlexfleetError as error:
        raise type(error)(f"{error}. {again}") from error
    if args.json:
        show(json.dumps({**about, **asdict(followed)}))
    return followed.exit_code


def nightly(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from flexfleet.config.form import form_of
    from flexfleet.kubeflow.schedule import schedule
    from flexfleet.kubeflow.submit import read

    own = fields_of(args.param, args.set)
    if "suite" in own:
        raise ConfigError("--param suite: give it with --suite")
    parameters = {"suite": args.suite, **form_of(args.set), **read("nightly", own)}
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
        show(json.dumps(asdict(scheduled)))
        return 0
    state = "new" if scheduled.made else "unchanged"
    state += f", {scheduled.replaced} old deleted" if scheduled.replaced else ""
    show(f"{scheduled.name} at {scheduled.cron!r} (UTC), {state}: {scheduled.url or scheduled.recurring_run_id}")
    if scheduled.active_runs:
        show(
            f"in progress: {', '.join(scheduled.active_runs)}. Its old recurring run is disabled, and the next "
            "`flexfleet nightly` deletes it"
        )
    return 0


def fields_of(texts: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of --param. Raises ConfigError for a field that is given twice, also by --set."""
    from flexfleet.config.form_fields import REMOTE, SHORT, STUDY
    from flexfleet.config.overrides import check_once

    found = tags_of(texts, "--param")
    if "advanced" in found:
        raise ConfigError("--param advanced: give each of its values with --set a.b=value")
    if len(found) < len(texts):
        names = [text.partition("=")[0] for text in texts]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--param {twice} is given twice: leave one of them out")
    paths = [*(SHORT | STUDY).items(), *((field, path) for path, field in REMOTE.items())]
    fields = [(f"--param {name}", {path: None}) for name, path in paths if name in found]
    check_once([*fields, ("--set", overrides)])
    return found

"""The commands of Kubeflow: submit, and nightly."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError, FlexfleetError, Stopped, masked
from flexfleet.commands.common import tags_of
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from flexfleet.config import Config


def submit(args: argparse.Namespace) -> int:
    if (args.pipeline is None) == (args.follow is None):
        raise ConfigError("submit takes the name of a pipeline to start, or --follow RUN_ID, one of the two")
    if args.follow is not None:
        return follow(args, args.follow, {})
    from dataclasses import asdict

    from flexfleet.config import pair_of
    from flexfleet.kubeflow.submit import given, read
    from flexfleet.kubeflow.submit import submit as start

    own = read(args.pipeline, fields_of(args.param, args.set))
    sets, of_labels = list(args.set), dict[str, Any]()
    if args.pipeline == "compare":  # `label:a.b=value` is of one label of it, and no configuration has labels
        sets = [text for text in args.set if ":" not in text.partition("=")[0]]
        of_labels = dict(pair_of(text) for text in args.set if text not in sets)
    values = given(args.pipeline, _config_of(args, sets), [pair_of(text)[0] for text in sets])
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
        where = "" if args.wait else f": {submitted.url or submitted.run_id}"  # which following begins with
        _teller(args)(said + where)
    if args.wait:
        return follow(args, submitted.run_id, asdict(submitted))
    show(json.dumps(asdict(submitted)) if args.json else f"to follow it: {_follow_again(args, submitted.run_id)}")
    return 0


def _config_of(args: argparse.Namespace, sets: list[str]) -> Config:
    """A night reads no file, as its suite says what is measured. Raises ConfigError."""
    from flexfleet.config import load_config
    from flexfleet.steps.prepare import config_of

    if args.pipeline != "nightly":
        return config_of(argparse.Namespace(**{**vars(args), "set": sets}))
    if args.config:
        raise ConfigError("--config: a suite says what is measured, so a night reads no file; leave it out")
    return load_config(None, sets)


def _teller(args: argparse.Namespace) -> Callable[[str], None]:
    """What tells a line: on stdout, which belongs to one object where --json is given; then on stderr."""
    return partial(print, file=sys.stderr, flush=True) if args.json else show


def _follow_again(args: argparse.Namespace, run_id: str) -> str:
    return f"flexfleet submit --follow {run_id}" + (f" --host {masked(args.host)}" if args.host else "")


def follow(args: argparse.Namespace, run_id: str, about: dict[str, object]) -> int:
    """`about`: what is already known about the run, for --json. Ctrl-C and SIGTERM stop following, not the run."""
    from dataclasses import asdict

    from flexfleet.kubeflow.follow import follow as watch

    again = f"to follow it again: {_follow_again(args, run_id)}"
    try:
        with stopping_at_once():
            followed = watch(run_id, host=args.host, tell=_teller(args))
    except (KeyboardInterrupt, Stopped) as stopped:
        print(f"not followed any more; the run goes on. {again[0].upper()}{again[1:]}", file=sys.stderr)
        return 143 if isinstance(stopped, Stopped) else 130  # 3 would say that the run was terminated
    except FlexfleetError as error:
        raise type(error)(f"{error}. {again[0].upper()}{again[1:]}") from error
    if args.json:
        show(json.dumps({**about, **asdict(followed)}))
    return followed.exit_code


def nightly(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from flexfleet.config.overrides import form_of
    from flexfleet.kubeflow.submit import read, schedule

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
    else:
        before = f", in place of {scheduled.replaced}" if scheduled.replaced else ""
        before += "" if scheduled.made else ", as it was"
        show(f"{scheduled.name} at {scheduled.cron!r} (UTC){before}: {scheduled.url or scheduled.recurring_run_id}")
    return 0


def fields_of(texts: Sequence[str], sets: Sequence[str]) -> dict[str, str]:
    """The values of --param, as texts. Raises ConfigError for one that is given twice, also by --set."""
    from flexfleet.config.overrides import check_once

    found = tags_of(texts, "--param")
    if "advanced" in found:
        raise ConfigError("--param advanced: give each of its values with --set a.b=value")
    if len(found) < len(texts):
        names = [text.partition("=")[0] for text in texts]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--param {twice} is given twice: leave one of them out")
    check_once(found, sets)
    return found

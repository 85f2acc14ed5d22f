"""The commands that look at this machine: fetch (data sets, files of a run), and doctor."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from fl_engine.core.errors import ConfigError
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show

MLFLOW_RUN = re.compile(r"[0-9a-f]{32}")


def fetch(args: argparse.Namespace) -> int:
    with stopping_at_once("the same command goes on"):
        return _fetch(args)


def _fetch(args: argparse.Namespace) -> int:
    if len(args.names) == 1 and MLFLOW_RUN.fullmatch(args.names[0]):
        return fetch_run(args)
    from fl_engine.core.allowed import trust
    from fl_engine.datasets import DATASETS, data_root, source_of

    root = data_root(args.root)
    trust(args.names)
    named = {name: source_of(name) for name in args.names}
    for source in named.values():
        if source.fetch is not None:
            source.fetch(root)
        source.load(root)
    listed = named or dict(sorted(DATASETS.items()))
    there = {name: not source.missing(root) for name, source in listed.items()}
    if args.json:
        about = {name: source.about for name, source in listed.items()}
        addresses = {name: source.address for name, source in listed.items()}
        show(json.dumps({"root": str(root), "datasets": there, "about": about, "source": addresses}))
        return 0
    width = max(map(len, listed))
    for name, source in listed.items():
        fetched = "nothing to fetch, checked" if source.fetch is None else "complete and checked"
        line = "; ".join(filter(None, (source.about, source.address)))
        show(f"{name:{width}} {fetched if named else source.on_disk(root):12} {line}")
    return 0


def fetch_run(args: argparse.Namespace) -> int:
    from flexfleet.pipeline.prepare import config_of
    from flexfleet.tracking.dvc_runs import fetch_run as bring

    config = config_of(args)
    if config.tracking.mlflow is None:
        raise ConfigError(f"{args.names[0]} is looked up in MLflow, and tracking.mlflow is null")
    out = args.out or Path(config.run.store) / args.names[0]
    brought = bring(config.tracking.mlflow, args.names[0], out)
    if args.json:
        show(json.dumps({"folder": str(out), "files": [str(path) for path in brought]}))
    else:
        show("\n".join(f"{path}  checked" for path in brought))
    return 0


def doctor(args: argparse.Namespace) -> int:
    from flexfleet.files.doctor import examine

    report = examine(args.measure)
    if args.json:
        show(json.dumps(report))
        return 0
    show(
        f"flexfleet {report['version']}, Python {report['python']}, {report['cpus']} CPUs, torch devices: "
        f"{', '.join(report['devices']) or 'none'}"
    )
    for extra, about in report["extras"].items():
        missing = ", ".join(about["missing"])
        state = f"missing {missing}: pip install 'flexfleet[{extra}]'" if missing else "installed"
        show(f"  {extra:10} {state}\n             {about['enables']}")
    if args.measure:
        from flexfleet.files.half_precision import said

        show(f"  the processor multiplies bfloat16 with: {', '.join(report['cpu_bf16']) or 'nothing of its own'}")
        for device, seconds in report["seconds_a_step"].items():
            for line in said(seconds):
                show(f"  {line} ({device}: a step of a quarter-width ResNet18, {1e3 * seconds['fp32']:.1f} ms in fp32)")
    width = max(map(len, report["data"]), default=0)
    for name, there in report["data"].items():
        show(f"  data {name:{width}} {'there' if there else 'not there'}")
    return 0

"""Commands for this machine and for enrolled devices: fetch, doctor, invite, agent, profile."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from fl_engine.core.errors import ConfigError
from fl_engine.core.system import install_command
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show

MLFLOW_RUN = re.compile(r"[0-9a-f]{32}")


def fetch(args: argparse.Namespace) -> None:
    with stopping_at_once("the same command continues"):
        if len(args.names) == 1 and MLFLOW_RUN.fullmatch(args.names[0]):
            return _fetch_run(args)
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
    if args.json:
        available = {name: not source.missing(root) for name, source in listed.items()}
        about = {name: source.about for name, source in listed.items()}
        addresses = {name: source.address for name, source in listed.items()}
        show(json.dumps({"root": str(root), "datasets": available, "about": about, "source": addresses}))
        return
    width = max(map(len, listed))
    for name, source in listed.items():
        fetched = "nothing to fetch, checked" if source.fetch is None else "complete and checked"
        line = "; ".join(filter(None, (source.about, source.address)))
        show(f"{name:{width}} {fetched if named else source.on_disk(root):12} {line}")


def _fetch_run(args: argparse.Namespace) -> None:
    from flexfleet.pipeline.prepare import config_of
    from flexfleet.tracking import dvc_remote

    config, run_id = config_of(args), args.names[0]
    if config.tracking.mlflow is None:
        message = f"tracking.mlflow must be the URL of the MLflow server with the run {run_id}, got null"
        raise ConfigError(message, code="config.missing", path="tracking.mlflow")
    out = args.out or Path(config.run.store) / run_id
    files = [str(path) for path in dvc_remote.fetch_run(config.tracking.mlflow, run_id, out)]
    show(json.dumps({"folder": str(out), "files": files}) if args.json else "\n".join(f"{f}  checked" for f in files))


def doctor(args: argparse.Namespace) -> None:
    from flexfleet.files.doctor import examine

    report = examine()
    devices, bf16 = (", ".join(report[name]) or "none" for name in ("devices", "cpu_bf16"))
    lines = [f"flexfleet {report['version']}, Python {report['python']}, {report['cpus']} CPUs"]
    lines.append(f"  torch devices: {devices}; instructions for bfloat16: {bf16}")
    for extra, about in report["extras"].items():
        missing = ", ".join(about["missing"])
        state = f"missing {missing}: {install_command(extra)}" if missing else "installed"
        lines.append(f"  {extra:10} {state}\n             {about['enables']}")
    width = max(map(len, report["data"]), default=0)
    for name, available in report["data"].items():
        lines.append(f"  data {name:{width}} {'available' if available else 'missing'}")
    show(json.dumps(report) if args.json else "\n".join(lines))


def invite(args: argparse.Namespace) -> None:
    from flexfleet.pipeline import enrollment
    from flexfleet.pipeline.prepare import config_of

    config = config_of(args)
    if args.revoke is not None:
        enrollment.revoke(config, args.revoke)
        show(json.dumps({"revoked": args.revoke}) if args.json else f"{args.revoke} will not get assignments")
        return
    written = [str(path) for path in enrollment.invite(config, args.tier, args.count, args.out)]
    text = "\n".join([*written, "Copy each file to one device, and run there: flexfleet agent --invite FILE"])
    show(json.dumps({"invitations": written}) if args.json else text)


def agent(args: argparse.Namespace) -> int:
    from flexfleet.worker.__main__ import serve

    return serve(args)


def profile(args: argparse.Namespace) -> None:
    from flexfleet.pipeline import profile as device
    from flexfleet.pipeline.prepare import resolved_of

    measured = device.profile(
        resolved_of(args),
        name=args.tier,
        memory_bytes=None if args.memory is None else args.memory * 1e6,
        seconds=args.seconds,
        device=args.device,
    )
    text = device.text(measured)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    show(json.dumps(asdict(measured)) if args.json else text.rstrip())

"""The commands of devices without Kubernetes: invite, agent, profile."""

from __future__ import annotations

import argparse
import json

from flexfleet.files.terminal import show


def invite(args: argparse.Namespace) -> int:
    from flexfleet.pipeline import enrollment
    from flexfleet.pipeline.prepare import config_of

    config = config_of(args)
    if args.revoke is not None:
        enrollment.revoke(config, args.revoke)
        show(json.dumps({"revoked": args.revoke}) if args.json else f"{args.revoke} gets no assignments any more")
        return 0
    written = [str(path) for path in enrollment.invite(config, args.tier, args.count, args.out)]
    if args.json:
        show(json.dumps({"invitations": written}))
        return 0
    show("\n".join(written))
    show("each file is for one device. On it: flexfleet agent --invite FILE")
    return 0


def agent(args: argparse.Namespace) -> int:
    from flexfleet.worker.server import run as serve

    return serve(args)


def profile(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from flexfleet.pipeline import profile as device
    from flexfleet.pipeline.prepare import resolved_of
    from flexfleet.worker.mailbox import invitation_of

    found = device.profile(
        resolved_of(args),
        None if args.invite is None else invitation_of(args.invite),
        name=args.tier,
        share=args.share,
        room=None if args.memory is None else args.memory * 1e6,
        seconds=args.seconds,
        on=args.device,
    )
    text = device.text(found)
    show(json.dumps(asdict(found)) if args.json else text.rstrip())
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0

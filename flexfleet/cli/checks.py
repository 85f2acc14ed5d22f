"""Commands that check, compare and forecast runs round by round: verify, diff, replay, trace, forecast."""

from __future__ import annotations

import argparse
import json
import logging
from bdb import BdbQuit
from dataclasses import asdict
from typing import Any

from fl_engine.core.allowed import trust
from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.registry import resolve
from flexfleet.api.results import load
from flexfleet.config.read import read_file
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show
from flexfleet.pipeline.difference import difference
from flexfleet.pipeline.forecast import PRICES
from flexfleet.pipeline.forecast import forecast as forecast_of
from flexfleet.pipeline.measured_trace import trace as write_trace
from flexfleet.pipeline.prepare import resolved_of
from flexfleet.reports.report import forecast_table

log = logging.getLogger("flexfleet")


def verify(args: argparse.Namespace) -> None:
    if args.sample < 0:
        raise ConfigError(f"--sample must be at least 0, got {args.sample}", path="sample")
    rounds = [_number(text, "--rounds") for text in args.rounds.split(",") if text.strip()]
    with stopping_at_once():
        found = load(args.run).verify(
            rounds, sample=args.sample, all=args.all, public_key=args.public_key, progress=log.info
        )
    if args.json:
        show(json.dumps({"ok": True, **asdict(found)}))
        return
    show(f"{found.run_id}: nothing has changed in {found.rounds} rounds")
    if found.public_key:
        show(f"signed with the key {found.public_key}")
    for name, again in (("merged", {*found.merged, *found.trained}), ("trained", found.trained)):
        if again:
            show(f"{name} again, with equal bits: {len(again)} of {found.rounds} rounds")
    if found.evaluated:
        show("evaluated the final model again, with equal results")
    if found.forgotten:
        show(f"no round asked the clients {', '.join(map(str, found.forgotten))}")
    for text in found.not_checked:
        show(f"not checked: {text}")


def diff(args: argparse.Namespace) -> None:
    found = difference(load(args.first).folder, load(args.second).folder)
    if args.json:
        show(json.dumps(asdict(found)))
        return
    if found.equal and not found.settings:
        show(f"equal: all assignments, updates and models in {found.rounds} rounds")
        return
    for name, (one, other) in (found.settings | found.inputs).items():
        show(f"{name}: {one} and {other}")
    if found.round is None:
        show(f"the assignments, updates and models are equal in {found.rounds} rounds")
        return
    what = f"update of client {found.client}" if found.what == "update" else found.what
    tensor = "" if found.tensor is None else f", by at most {found.largest:.3g} in {found.tensor}"
    show(f"first difference: round {found.round}: {what}{tensor}")


def replay(args: argparse.Namespace) -> None:
    on_step: Any = None
    if args.on_step is not None:
        if ":" not in args.on_step:
            raise ConfigError(f"--on-step must be package.module:function, got {args.on_step!r}", path="on_step")
        trust([args.on_step])
        on_step = resolve({}, args.on_step, "function")
    try:
        found = load(args.run).replay(
            args.round, args.client, settings=args.set, on_step=_debug if args.pdb else on_step
        )
    except BdbQuit:
        raise Stopped("the replay was stopped in the debugger") from None
    update = found.update
    about = {"samples": update.num_examples, "loss": update.metrics["loss"], "same_bits": found.same_bits}
    if args.json:
        show(json.dumps({"round": args.round, "client": args.client, **about}))
        return
    bits = "; the bits match the run" if found.same_bits else ""
    show(f"round {args.round}, client {args.client}: {about['samples']} samples, loss {about['loss']:.4g}{bits}")


def trace(args: argparse.Namespace) -> None:
    found = write_trace(args.run, args.out)
    if args.json:
        show(json.dumps(found))
        return
    show(f"{found['file']}: {found['clients']} clients measured in {found['rounds']} rounds")
    median, p90 = found["error"].values()
    if median is not None:
        show(f"error of the simulated clock: median {100 * median:.1f} %, 90th percentile {100 * p90:.1f} %")


def forecast(args: argparse.Namespace) -> None:
    if not 0 <= args.probe < float("inf"):
        raise ConfigError(f"--probe must be at least 0, got {args.probe:g}", code="config.out_of_range", path="probe")
    prices = {} if args.prices is None else read_file(args.prices)
    for name, price in prices.items():
        if name not in PRICES or not isinstance(price, int | float) or not 0 <= price < float("inf"):
            expected = f"must map {', '.join(PRICES)} to numbers of at least 0"
            raise ConfigError(f"{args.prices} {expected}, got {name}: {price!r}", path="prices")
    with stopping_at_once():
        found = forecast_of(resolved_of(args), args.probe, prices)
    if args.json:
        show(found.model_dump_json(exclude={"schema_version"}))
        return
    show(forecast_table(found).text())
    for level in (each for each in found.levels if each["peak"]):
        show(f"training {level['name']} needs {level['peak']['low']:.0f} to {level['peak']['high']:.0f} MB")
    for tier in found.tiers:
        fits = ", ".join(tier["levels"]) or f"no level (clients {', '.join(map(str, tier['clients']))})"
        show(f"tier {tier['name']}: {len(tier['clients'])} devices with {tier['memory']:.1f} % memory hold {fits}")


def _debug(spec: Any, weights: Any, batch: Any) -> None:
    """Open the debugger. `continue` runs until the next step, and `quit` ends the replay."""
    breakpoint()


def _number(text: str, option: str) -> int:
    if not text.strip().isdecimal() or len(text) > 9:
        raise ConfigError(f"{option} must be whole numbers, got {text[:40]!r}", path=option.strip("-"))
    return int(text)

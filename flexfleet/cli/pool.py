"""The command pool: the sub-models that an algorithm cuts, without a run."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

from fl_engine.core.errors import ConfigError
from flexfleet.files.signals import stopping_at_once
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from fl_engine.core.contracts import ModelFamily
    from flexfleet.config import Config
    from flexfleet.files.artifacts import PoolFile


def pool(args: argparse.Namespace) -> int:
    from fl_engine.preparation.weights import given as weights_of
    from fl_engine.rounds.server import LazyServer
    from flexfleet.files import prepared
    from flexfleet.files.artifacts import Apoz
    from flexfleet.pipeline import model_pool, partition, pretrain
    from flexfleet.pipeline.prepare import resolved_of

    resolved = resolved_of(args)
    config, algorithm = resolved.config, resolved.algorithm
    made: Mapping[str, Any] = {"apoz": Apoz.read(args.apoz)} if args.apoz else {}
    missing = [name for name in algorithm.preparations if name not in made]
    given = _stand_in(args, config, needs_data=bool(missing))
    family = resolved.network(*given) if given else resolved.family
    if missing and given:
        made = _Unprepared(made)
    elif missing:
        with stopping_at_once(), tempfile.TemporaryDirectory() as scratch:
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
        show(json.dumps({**built.model_dump(mode="json"), "mean": mean}) if mean else built.model_dump_json())
        return 0
    outputs = f"{built.classes} output{'s' if built.classes > 1 else ''}"
    show(f"{built.algorithm} on {built.model}, {outputs}, input {'x'.join(map(str, built.input_chw))}")
    show(f"{'model':8}{'share %':>9}{'parameters':>13}{'MB':>9}{'MFLOPs':>10}  widths")
    for m in built.levels:
        widths = " ".join(str(w) for w in m.widths.values())
        flops = f"{m.flops / 1e6:11.6f}" if mean else f"{m.flops / 1e6:10.2f}"
        show(f"{m.name:8}{100 * m.share:9.2f}{m.params:13,}{m.bytes / 1e6:9.2f}{flops}  {widths}")
    if mean:
        show(
            f"mean of the models sent: {mean['params'] / 1e6:.3f} M parameters, {mean['flops'] / 1e6:.3f} M FLOPs, "
            f"{mean['mib']:.2f} MB (of 2^20 bytes)"
        )
    return 0


def _as_in_table_3_6(built: PoolFile, family: ModelFamily) -> tuple[PoolFile, dict[str, float]]:
    """Return the pool with FLOPs counted as in FedRolex's Table 3.6, and the means of its columns over the models sent:
    parameters, FLOPs, and MB of 2^20 bytes (`mib`)."""
    from fl_engine.core.costs import count_macs
    from fl_engine.core.types import SubmodelSpec

    levels = tuple(
        m.model_copy(update={"flops": count_macs(family, SubmodelSpec.from_json(m.spec), linear=2)})
        for m in built.levels
    )
    sent = [m for m in levels if m.dispatched]
    params, flops = (fmean(getattr(m, name) for m in sent) for name in ("params", "flops"))
    return built.model_copy(update={"levels": levels}), {"params": params, "flops": flops, "mib": 4 * params / 2**20}


class _Unprepared(dict[str, Any]):
    """Results of preparations that need data which are missing. An algorithm that can list its sub-models without one
    asks by `get`."""

    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"the pool asks for {name}, which takes data: leave out --input and --classes (or for apoz "
            "give --apoz FILE, a pretrain step's apoz.json, or --set algorithm.use_apoz=false)"
        )


def _stand_in(args: argparse.Namespace, config: Config, needs_data: bool) -> tuple[tuple[int, ...], int] | None:
    """Return the shape of a sample and the number of outputs if `pool` needs no data set: those of --input and
    --classes, or those that the network was published for unless a data set is named."""
    from fl_engine.core.contracts import PublishedFor
    from fl_engine.models.build import model_kind
    from flexfleet.config.schema import DatasetConfig
    from flexfleet.pipeline.prepare import parse_input

    if args.input is None and args.classes is None:
        kind = model_kind(config.model)
        set_here = "dataset.name" in args.set
        named = set_here or config.dataset.name != DatasetConfig().name
        if isinstance(kind, PublishedFor) and not named and not needs_data:
            return kind.published_input, kind.published_outputs
        return None
    if args.input is None or args.classes is None:
        raise ConfigError("--input and --classes go together: they stand in for a data set")
    if args.classes < 1:
        raise ConfigError(f"--classes says how many outputs the network has, at least 1; got {args.classes}")
    return parse_input(args.input), args.classes

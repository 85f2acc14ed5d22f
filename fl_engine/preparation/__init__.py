"""The preparations: what algorithms compute before the first round. A new one is a file and a line here."""

from __future__ import annotations

from dataclasses import fields

from fl_engine.core.contracts import Algorithm, ModelFamily, Preparation
from fl_engine.core.errors import ConfigError
from fl_engine.core.registry import Contract
from fl_engine.core.types import Prepared
from fl_engine.preparation.apoz import MeasureApoz
from fl_engine.preparation.supernet import TrainSupernet

PREPARATIONS: dict[str, type[Preparation]] = {"apoz": MeasureApoz, "supernet": TrainSupernet}

CONTRACT = Contract("preparation", PREPARATIONS, Preparation)


def preparation(name: str) -> Preparation:
    """The preparation registered under this name, or the object `package.module:NAME`."""
    kind = CONTRACT.kind(name)
    if options := [field.name for field in fields(kind) if field.init]:  # type: ignore[arg-type]
        raise ConfigError(
            f"preparation {name!r} has the fields {', '.join(options)}, which nothing sets: make them parameters of "
            "the algorithm, and list these in `settings`"
        )
    return kind()


def assumed(algorithm: Algorithm, family: ModelFamily) -> Prepared:
    """Stand-ins for the preparations' results, with which `pool` is checked before anything is computed."""
    return {name: preparation(name).assumed(family) for name in algorithm.preparations}


__all__ = ["CONTRACT", "PREPARATIONS", "MeasureApoz", "TrainSupernet", "assumed", "preparation"]

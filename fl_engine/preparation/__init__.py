"""Preparations, which algorithms run once before the first round. List a new preparation in PREPARATIONS."""

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
    """Return an instance of the preparation with this name, or of the class `package.module:NAME`."""
    kind = CONTRACT.kind(name)
    if options := [field.name for field in fields(kind) if field.init]:  # type: ignore[arg-type]
        raise ConfigError(
            f"preparation {name!r} must not have fields, got {', '.join(options)}. Define options of the "
            "algorithm instead, and list their names in `settings`"
        )
    return kind()


def assumed(algorithm: Algorithm, family: ModelFamily) -> Prepared:
    """Return placeholders for the preparations' results, so that `pool` can be checked before the preparations run."""
    return {name: preparation(name).assumed(family) for name in algorithm.preparations}


__all__ = ["CONTRACT", "PREPARATIONS", "MeasureApoz", "TrainSupernet", "assumed", "preparation"]

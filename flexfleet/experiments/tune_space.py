"""What a study searches: the space, the values that a trial draws, and whether their pool fits.

A study searches values of dotted names of the configuration, so it can tune every parameter of every algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from fl_engine.core.contracts import Interval, ModelFamily, Searched
from fl_engine.core.errors import BadInput, ConfigError, brief
from fl_engine.core.types import Pool
from fl_engine.fleet import devices
from fl_engine.selection.capacity import lacks
from flexfleet.config import Config, Range, algorithm, parse, set_path

log = logging.getLogger("flexfleet")

Values = Mapping[str, Any]


def space_of(config: Config, pool: Pool) -> dict[str, Range]:
    """`tune.space`, else the space that the algorithm declares (`pool` is the default's). Raises ConfigError if there
    is none, or for a range that is none."""
    if config.tune.space:
        check_whole(config.tune.space)
        return dict(config.tune.space)
    space = {path: _range(path, each) for path, each in _declared(config, pool).items()}
    check_whole(space)
    if not space:
        raise ConfigError(
            f"tune.space is empty, and {config.algorithm['name']} declares no search space of its own as it is "
            "configured: say what to search, a.b: {low, high}"
        )
    return space


def check_whole(space: Mapping[str, Range]) -> None:
    """Raises ConfigError for a range of whole numbers whose ends are none: what is drawn would lie outside of it. (Not
    when the configuration is read: records of earlier versions have such ranges.)"""
    for path, each in space.items():
        ends = [end for end in (each.low, each.high) if end is not None]
        if each.whole and not all(end.is_integer() for end in ends):
            raise ConfigError(f"tune.space, {path}: low and high are whole numbers where whole is true, got {ends}")


def _range(path: str, each: Interval) -> Range:
    try:
        return Range(low=each.low, high=each.high, log=each.log, whole=each.whole, choices=each.choices)
    except ValidationError as error:
        raise ConfigError(f"the search space of the algorithm, {path}: {brief(error)}, got {each}") from error


def _declared(config: Config, pool: Pool) -> dict[str, Interval]:
    """The search space that the algorithm declares, by dotted names; empty if it declares none."""
    chosen = algorithm(config)
    space = chosen.search_space(pool) if isinstance(chosen, Searched) else {}
    return {f"algorithm.{path}": interval for path, interval in space.items()}


def unchanged(config: Config, space: Mapping[str, Range], pool: Pool) -> dict[str, Any]:
    """The configuration's values of the names in the space. If a value is null, the algorithm may say which value it
    uses instead (`pool` is the default's); else it is left out."""
    declared = _declared(config, pool)
    values = {}
    for path in space:
        here = configured(config, path)
        if here is None and path in declared:
            here = declared[path].start
        if here is not None:
            values[path] = here
    return values


def defaults(config: Config, space: Mapping[str, Range], pool: Pool) -> dict[str, Any]:
    """The `unchanged` values that lie in the space. Trial 0 runs the whole configuration as it is, and the sampler
    learns from these values."""
    values = {path: here for path, here in unchanged(config, space, pool).items() if _within(here, space[path])}
    if outside := [f"{path} ({configured(config, path)})" for path in space if path not in values]:
        log.info(
            "trial 0 runs the configuration unchanged; these configured values are outside the search space: %s",
            ", ".join(outside),
        )
    return values


def configured(config: Config, path: str) -> Any:
    """The configuration's value of a parameter; None if it has none."""
    section, *rest = path.split(".")
    here: Any = vars(algorithm(config)) if section == "algorithm" else config.model_dump(mode="json").get(section)
    for part in rest:
        here = _inside(here, part)
    return here


def _inside(value: Any, part: str) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value[int(part)] if part.isdecimal() and int(part) < len(value) else None
    return value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)


def _within(value: Any, range: Range) -> bool:
    if range.choices:
        return value in range.choices
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    assert range.low is not None and range.high is not None
    return numeric and range.low <= value <= range.high


def symbols(config: Config, paths: Iterable[str]) -> dict[str, str]:
    """Map the options of the configured algorithm, as far as its paper has symbols for them, to these symbols."""
    known: Mapping[str, str] = getattr(algorithm(config), "symbols", {})
    options = {
        path: path.removeprefix("algorithm.").partition(".")[0] for path in paths if path.startswith("algorithm.")
    }
    return {path: known[option] for path, option in options.items() if option in known}


def suggest(trial: Any, space: Mapping[str, Range]) -> dict[str, Any]:
    """Draws a value for each name."""
    values = {}
    for path, r in space.items():
        if r.choices:
            values[path] = trial.suggest_categorical(path, list(r.choices))
        elif r.whole:
            values[path] = trial.suggest_int(path, int(r.low or 0), int(r.high or 0), log=r.log)
        else:
            values[path] = trial.suggest_float(path, r.low, r.high, log=r.log)
    return values


def applied(config: Config, values: Values) -> Config:
    """The configuration with these values, checked. `a.b.0` and `a.b.1` set the whole list a.b."""
    out, lists = config.model_dump(mode="json"), dict[str, dict[int, Any]]()
    for path, value in values.items():
        parent, _, last = path.rpartition(".")
        if last.isdecimal():
            lists.setdefault(parent, {})[int(last)] = value
        else:
            set_path(out, path, value)
    for path, items in lists.items():
        if sorted(items) != list(range(len(items))):
            raise ConfigError(f"tune.space: of {path} {sorted(items)} are searched: all of a list have to be")
        set_path(out, path, [items[i] for i in range(len(items))])
    return parse(out)


def check_names(config: Config) -> None:
    """Raises ConfigError where a name in `tune.space` takes none of its values: it is misspelt, say. Names may need
    each other, as an option and what has it, so what can be together is not looked at one by one."""
    values = {
        path: list(r.choices) or [int(v) if r.whole else v for v in (r.low or 0, r.high or 0)]
        for path, r in config.tune.space.items()
    }
    most = max(map(len, values.values()), default=0)
    if any(_wrong(config, {path: of[min(k, len(of) - 1)] for path, of in values.items()}) is None for k in range(most)):
        return
    for path, of in values.items():
        if not path.rpartition(".")[2].isdecimal() and all(wrongs := [_wrong(config, {path: value}) for value in of]):
            raise ConfigError(f"tune.space: {path}: {wrongs[0]}")


def _wrong(config: Config, values: Values) -> str | None:
    try:
        applied(config, values)
    except BadInput as error:
        return str(error)
    return None


def excess(pool: Pool, config: Config, family: ModelFamily) -> dict[str, float]:
    """By how many points (% of the full model) each level is larger than its tier can hold; 0 or less: it fits. Level i
    belongs to tier i if there are as many levels as tiers; else only the smallest level has to fit the weakest tier. In
    the default fleet the smallest level always fits.

    The full model is left out, since no search makes it smaller; so is a level that is sent alone: its method ignores
    memory on purpose, or asks only devices that hold it, and refuses a fleet that has none."""
    sent = sorted((model for model in pool if model.dispatched), key=lambda model: model.share)
    if len(sent) == 1:
        return {}
    levels = [model.share for model in sent]
    named = config.fleet.tiers
    configured = devices.named(named) if isinstance(named, str) else named
    tiers = sorted(
        (devices.device_of(0, tier) for tier in devices.holding(configured, family, sent[0].params)),
        key=lambda device: device.most,
    )
    if len(levels) != len(tiers):
        levels, tiers = levels[:1], tiers[:1]
    pairs = zip(levels, tiers, strict=True)
    return {f"size/{device.tier}": lacks(device, level) for level, device in pairs if level < 1}

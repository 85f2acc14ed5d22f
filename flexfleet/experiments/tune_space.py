"""Build the search space of a study, draw the values of a trial, and check whether the pool fits into the devices.

The search space maps dotted names of parameters to ranges, so a study can search any parameter of any algorithm.
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
from flexfleet.config import Config, Range, algorithm, dotted, parse

log = logging.getLogger("flexfleet")

Values = Mapping[str, Any]


def space_of(config: Config, pool: Pool) -> dict[str, Range]:
    """Return `tune.space`. If `tune.space` is empty, return the search space that the algorithm declares for the
    default `pool`. Raises ConfigError if both search spaces are empty, or if a declared range is invalid."""
    try:
        space = config.tune.space or {
            path: Range(low=each.low, high=each.high, log=each.log, whole=each.whole, choices=each.choices)
            for path, each in _declared(config, pool).items()
        }
    except ValidationError as error:
        message = f"{config.algorithm['name']} declares an invalid search space: {brief(error)}"
        raise ConfigError(message, path="tune.space") from error
    if not space:
        raise ConfigError.at(
            f"`tune.space` is empty, and {config.algorithm['name']} does not declare a search space for this "
            "configuration. Set the range of a parameter as a.b: {low, high}"
        )
    return space


def _declared(config: Config, pool: Pool) -> dict[str, Interval]:
    """Return the search space that the algorithm declares, as {dotted name: interval}; empty if it declares none."""
    chosen = algorithm(config)
    space = chosen.search_space(pool) if isinstance(chosen, Searched) else {}
    return {f"algorithm.{path}": interval for path, interval in space.items()}


def unchanged(config: Config, space: Mapping[str, Range], pool: Pool) -> dict[str, Any]:
    """Return the configured values of the parameters in the space. If a parameter is null, the algorithm can declare a
    value for it. Parameters without a value are omitted."""
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
    """Return the values of `unchanged` that are inside the search space. The sampler receives these values as the
    parameters of trial 0, which runs the unchanged configuration."""
    values = {path: here for path, here in unchanged(config, space, pool).items() if _within(here, space[path])}
    if outside := [f"{path} ({configured(config, path)})" for path in space if path not in values]:
        log.info(
            "trial 0 runs the unchanged configuration, although these values are outside the search space: %s",
            ", ".join(outside),
        )
    return values


def configured(config: Config, path: str) -> Any:
    """Return the configured value of a parameter. Return None if the parameter does not have a value."""
    section, *rest = path.split(".")
    here: Any = vars(algorithm(config)) if section == "algorithm" else config.model_dump(mode="json").get(section)
    for part in rest:
        if isinstance(here, Sequence) and not isinstance(here, str):
            here = here[int(part)] if part.isdecimal() and int(part) < len(here) else None
        else:
            here = here.get(part) if isinstance(here, Mapping) else getattr(here, part, None)
    return here


def _within(value: Any, range: Range) -> bool:
    if range.choices:
        return value in range.choices
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and (range.low or 0) <= value <= (range.high or 0)


def symbols(config: Config, paths: Iterable[str]) -> dict[str, str]:
    """Map each option of the algorithm to its symbol in the paper. Options without a symbol are omitted."""
    known: Mapping[str, str] = getattr(algorithm(config), "symbols", {})
    options = {path: path.split(".")[1] for path in paths if path.startswith("algorithm.")}
    return {path: known[option] for path, option in options.items() if option in known}


def listed(values: Mapping[str, Any], symbols: Mapping[str, str]) -> str:
    return ", ".join(f"{named(path, symbols)} {shown(value)}" for path, value in values.items())


def named(path: str, symbols: Mapping[str, str]) -> str:
    """Return the name of a parameter for display, without `algorithm.` and with the paper's symbol, if there is one."""
    name = path.removeprefix("algorithm.")
    return f"{symbols[path]} ({name})" if path in symbols else name


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def suggest(trial: Any, space: Mapping[str, Range]) -> dict[str, Any]:
    """Draw a value for each parameter of the space."""
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
    """Return a validated copy of the configuration with these values. `a.b.0` and `a.b.1` set the list `a.b`."""
    given, lists = dict[str, Any](), dict[str, dict[int, Any]]()
    for path, value in values.items():
        parent, _, last = path.rpartition(".")
        if last.isdecimal():
            lists.setdefault(parent, {})[int(last)] = value
        else:
            given[path] = value
    for path, items in lists.items():
        if sorted(items) != list(range(len(items))):
            raise ConfigError(f"`tune.space` must list every index of {path}, starting with 0, got {sorted(items)}")
        given[path] = [items[i] for i in range(len(items))]
    return parse(dotted.applied(config.model_dump(mode="json"), given))


def check_names(config: Config) -> None:
    """Raise ConfigError if a name in `tune.space` is not a parameter. Some parameters are only valid with certain
    values of another parameter, such as the algorithm. Therefore all parameters are set together: first each parameter
    to its first value, then each to its second value, and so on, until a configuration is valid."""
    values = {
        path: list(r.choices) or [int(v) if r.whole else v for v in (r.low or 0, r.high or 0)]
        for path, r in config.tune.space.items()
    }
    errors = []
    for k in range(max(map(len, values.values()), default=0)):
        try:
            applied(config, {path: each[min(k, len(each) - 1)] for path, each in values.items()})
        except BadInput as error:
            errors.append(error)
        else:
            return
    if errors:
        raise ConfigError.at(f"`tune.space`: {errors[0]}", code=errors[0].code)


def excess(pool: Pool, config: Config, family: ModelFamily) -> dict[str, float]:
    """Return each level's size minus the memory of its tier, in percent of the full model; at most 0 if it fits.

    Level i must fit into tier i if there are as many levels as tiers. In all other pools, only the smallest level must
    fit into the weakest tier. The full model is excluded, because the search cannot change its size. The result is
    empty if only one level is sent, because the algorithm then ignores memory or selects only devices with enough
    memory.
    """
    sent = sorted((model for model in pool if model.dispatched), key=lambda model: model.share)
    if len(sent) == 1:
        return {}
    levels = [model.share for model in sent]
    tiers = sorted(
        (devices.device_of(0, tier) for tier in devices.holding(config.fleet.tiers, family, sent[0].params)),
        key=lambda device: device.most,
    )
    if len(levels) != len(tiers):
        levels, tiers = levels[:1], tiers[:1]
    pairs = zip(levels, tiers, strict=True)
    # A level whose size equals the free memory does not fit.
    return {f"size/{device.tier}": 100 * level + 1e-9 - device.most for level, device in pairs if level < 1}


def importance(study: Any, complete: Sequence[Any], space: Mapping[str, Any]) -> dict[str, float]:
    """Map each parameter to its importance; 0 if there are fewer than four trials, or if all values are equal."""
    import optuna

    complete = [t for t in complete if all(p in t.params for p in space)]  # ignore trial 0 if it is outside the space
    varied = {p for p in space if len({repr(t.params.get(p)) for t in complete}) > 1}
    shares = dict.fromkeys(space, 0.0)
    if len(complete) > 3 and varied and len({t.value for t in complete}) > 1:
        shares |= optuna.importance.get_param_importances(study, params=sorted(varied))
    return {path: float(share) for path, share in shares.items()}


def same(setting: Config, config: Config) -> bool:
    """Return whether both configurations result in the same runs. An omitted option counts as its default value."""
    whole = setting.model_copy(update={"algorithm": config.algorithm})
    return whole == config and algorithm(setting) == algorithm(config)

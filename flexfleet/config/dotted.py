"""Define short names and form fields of parameters, and apply overrides by dotted name.

This module does not import torch, so that commands start quickly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, holds_password, masked
from fl_engine.core.fields import is_model
from fl_engine.core.text import comment_of, read_yaml

SHORT: dict[str, str] = {
    "dataset": "dataset.name",
    "model": "model.name",
    "algorithm": "algorithm.name",
    "clients": "partition.clients",
    "partition_rule": "partition.rule",
    "dirichlet_alpha": "partition.alpha",
    "rounds": "rounds.stop",
    "client_fraction": "training.fraction",
    "local_epochs": "training.epochs",
    "learning_rate": "training.lr",
    "seed": "seed",
    "mlflow_uri": "tracking.mlflow",
    "store_uri": "run.store",
}
"""Map short names to dotted names. A `store_uri` with a scheme (s3://bucket/prefix) sets run.remote instead."""
STUDY: dict[str, str] = {"trials": "tune.trials"}
"""Map short names of parameters for studies to dotted names."""
LISTED = {name: SHORT[name] for name in ("dataset", "model", "algorithm")}
"""Form fields that accept only registered names. To use your own class, override the parameter in `advanced`."""
FIELDS = {path: name for name, path in (SHORT | STUDY).items()} | {"run.remote": "store_uri"}
"""Map dotted names to short names."""

INSTEAD = {
    "tracking.mlflow": "give the server's address alone, and MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN, as keys of the Secret flexfleet-mlflow (FLEXFLEET_MLFLOW_SECRET names another)",
    "dataset.root": "give the address without it, and let git ask its credential helper (`git help credentials`)",
    "tune.storage": "leave it out, and put the address into the Secret flexfleet-tune (FLEXFLEET_TUNE_SECRET names "
    "another) as FLEXFLEET_TUNE_STORAGE",
}
"""Map each parameter with an address to the advice for users who wrote a password into this address."""

SPACE = "tune.space"
MAPPINGS = ("kubernetes.pools", SPACE)
"""Mappings with arbitrary keys. An override of `tune.space` replaces the whole mapping. An override of
`kubernetes.pools` replaces only the given tiers."""


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to {dotted name: value}. The mappings in MAPPINGS are not flattened."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        out |= leaves(value, f"{path}.") if isinstance(value, Mapping) and path not in MAPPINGS else {path: value}
    return out


def locate(name: str, known: Mapping[str, Any]) -> str:
    """Return the dotted name in `known` whose last part is `name`, to suggest this parameter. Return "" if no parameter
    matches. Parameters with a short name come first, then parameters of `training`. `kubernetes.data` does not match,
    because users who write `data` mean the data set."""
    last = {path: path.rpartition(".")[2] for path in leaves(known) if path != "kubernetes.data"}
    paths = [path for path in last if last[path] in (name, f"{name}s")]
    return min(paths, key=lambda path: (path not in FIELDS, not path.startswith("training.")), default="")


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` in which `change` is applied to each value inside nested mappings and lists."""
    if isinstance(value, Mapping):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(inner, change) for inner in value]
    return change(value)


def place(name: str, value: object) -> str:
    """Return the dotted name for a short name. For `store_uri`, the dotted name depends on the value."""
    if name == "store_uri" and "://" in str(value):
        return "run.remote"
    return {**SHORT, **STUDY}[name]


def no_passwords(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a parameter contains a password, because Kubeflow stores and shows parameters."""
    for name, value in given.items():
        if any(holds_password(text) for text in _texts(value)):
            path = name.rpartition(":")[2]
            instead = INSTEAD.get(SHORT.get(path, path), "give the address without it")
            raise ConfigError(f"{name} must not contain a password, which Kubeflow would show; {instead}", path=path)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def platform_uri() -> str | None:
    """Return MLFLOW_TRACKING_URI, which the user or Kubeflow's plugin sets, without its password."""
    return masked(os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/") or None


def platform_store() -> str | None:
    """Return FLEXFLEET_S3_STORE, the address s3://bucket/prefix of the platform's store; None if it is not set."""
    return os.environ.get("FLEXFLEET_S3_STORE") or None


Overrides = dict[str, Any]
"""Map dotted names to values, such as {"training.lr": 0.1, "rounds": {"stop": 5}}."""


def parse_sets(texts: Iterable[str]) -> Overrides:
    """Parse strings such as `a.b=value` into overrides. Later values override earlier values. Raises ConfigError."""
    out: Overrides = {}
    for text in texts:
        path, value = pair_of(text)
        out = on_top(out, {path: value})
    return out


def pair_of(text: str) -> tuple[str, Any]:
    """Parse `a.b=value` into a dotted name and a value. Raises ConfigError."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set must be a.b=value, got {masked(repr(text[:200]))}")
    try:
        read, comment = read_yaml(value), comment_of(value)
    except yaml.YAMLError as error:
        message = masked(f"--set {text[:200]!r}: the value is not valid YAML: {error}")
        raise ConfigError(message, code="config.yaml", path=key.strip()) from error
    if comment:
        raise ConfigError(
            f"--set {masked(key.strip()[:200])}: '#' begins a comment. Put the whole value in quotes",
            code="config.yaml",
            path=key.strip(),
        )
    return key.strip(), read


def check_once(given: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError if a parameter is set twice, either by its name or as a part of its section.

    Args:
        given: Pairs (source, values by dotted name). The source, such as `--set`, is shown in the message.
    """
    seen: dict[str, str] = {}
    for where, values in given:
        for path in values:
            for leaf in leaves({path: values[path]}):
                if twice := next((each for each in seen if meet(each, leaf)), None):
                    name, places = min(twice, leaf, key=len), dict.fromkeys((seen[twice], where))
                    raise ConfigError(
                        f"{name} is set twice, by {' and '.join(places)}. Remove one of the settings",
                        code="config.given_twice",
                        path=name,
                    )
                seen[leaf] = where


def on_top(below: Mapping[str, Any], above: Mapping[str, Any]) -> Overrides:
    """Merge two mappings. Values in `above` override values in `below`. Both can be nested or have dotted keys."""
    taken = leaves(above)
    out = dict(pair for path, value in below.items() for pair in without(taken, path, value))
    for path, value in above.items():
        out[path] = merged(out.pop(path, None), value, path)
    return out


def without(taken: Collection[str], path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a pair (dotted name, value) for each parameter that `path` sets. Omit parameters in `taken`.

    If `taken` contains parameters of a mapping, the remaining parameters of this mapping are yielded one by one. A
    mapping with a `name` is yielded unchanged, because the name determines the other options of the mapping."""
    above = any(each.startswith(f"{path}.") for each in taken)
    if not isinstance(value, Mapping) or path in MAPPINGS:
        if not (above or path in taken):
            yield path, value
    elif above and not ("name" in value and chosen_by_name(path)):
        for key, inner in value.items():
            yield from without(taken, f"{path}.{key}", inner)
    else:
        yield path, value


def applied(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the nested `values` with the overrides applied. Names of components are set first, because a
    component's name determines which options exist."""

    def order(pair: tuple[str, Any]) -> tuple[bool, int]:
        path, value = pair
        section, _, last = path.rpartition(".")
        if isinstance(value, Mapping) and "name" in value:
            section, last = path, "name"
        is_name = last == "name" and chosen_by_name(section)
        return (False, section.count(".")) if is_name else (True, 0)

    out = dict(values)
    for path, value in sorted(overrides.items(), key=order):
        for part in reversed(path.split(".")):
            value = {part: value}
        out = merged(out, value)
    return out


def merged(below: Any, above: Any, path: str = "") -> Any:
    """Merge two nested mappings. Values in `above` override values in `below`, and all other values are kept. If the
    `name` of a mapping changes, its old parameters are dropped. The search space is replaced as a whole."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping) or path == SPACE:
        return above
    if "name" in above and above["name"] != below.get("name") and chosen_by_name(path):
        return dict(above)
    prefix = f"{path}." if path else ""
    return {**below, **{key: merged(below.get(key), value, f"{prefix}{key}") for key, value in above.items()}}


def meet(one: str, other: str) -> bool:
    """Return whether two dotted names are equal, or whether one of them is a section that contains the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def chosen_by_name(path: str) -> bool:
    """Return whether the options of the mapping at this dotted name depend on the `name` in the mapping. The result is
    True for models, algorithms, codecs and their named options, and False for plain sections (`dataset`)."""
    from fl_engine.algorithms.training import Training  # import here, so that commands start without torch
    from flexfleet.config.schema import Config

    if any(meet(path, each) for each in MAPPINGS):
        return False
    here: Any = Config
    for part in path.split(".") if path else ():
        if not is_model(here):
            return True
        field = here.model_fields.get(part)
        here = None if field is None else field.annotation
    return not (is_model(here) or here is Training)

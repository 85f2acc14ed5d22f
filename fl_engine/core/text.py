"""Parse and write YAML, Kubernetes quantities such as 512Mi, addresses and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from fl_engine.core.errors import ConfigError, printable

PERCENT = ("accuracy", "accuracy_all", "top5")
"""Names of metrics in [0, 1] that logs, tables and pages show in %."""

# ------------------------------------------------------------------------------------------------------- YAML
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_BOOL, _TEXT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
MOST_VALUES, DEEPEST = 100_000, 50
"""Maximum number of values and maximum nesting depth of a configuration. Without limits, a few lines of YAML aliases
could expand to more values than fit into memory."""


class _Yaml(yaml.SafeLoader):
    """Reads 1e-3 as a number, 012 as twelve and the key `on` as a string, in contrast to YAML 1.1. Rejects duplicate
    keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in pairs if tag not in (_INT, _FLOAT)]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
            if key.tag == _BOOL:
                key.tag = _TEXT
        return super().construct_mapping(node, deep)


class _Writer(yaml.SafeDumper):
    """Quotes strings that `_Yaml` or YAML 1.1 would read as another type."""


for _kind in (_Yaml, _Writer):
    _kind.add_implicit_resolver(_INT, re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
    _kind.add_implicit_resolver(
        _FLOAT,
        re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
        list("-+0123456789."),
    )
_Yaml.add_constructor(_INT, lambda loader, node: int(node.value, 10))


def read_yaml(text: str) -> Any:
    """Read YAML from `params.yaml` or `--set`. Raises yaml.YAMLError if the YAML is invalid."""
    try:
        value = yaml.load(text, _Yaml)  # noqa: S506 - a SafeLoader
        check_plain(value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML raises these errors, for example if a tag does not match its value, or a number has 5000 digits.
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
    except yaml.YAMLError as error:
        raise yaml.YAMLError(str(error).replace('in "<unicode string>", ', "in ")) from error
    return value


def comment_of(text: str) -> str:
    """Return the first comment in a YAML string, or an empty string. Raises yaml.YAMLError."""
    end = 0
    for token in yaml.scan(text, _Yaml):
        between = text[end : token.start_mark.index]
        if "#" in between:
            return between[between.index("#") :].strip()
        end = token.end_mark.index
    return ""


def write_yaml(value: Any) -> str:
    """Convert plain data to YAML that `read_yaml` can read."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=False)


def check_plain(value: Any) -> None:
    """Raise ValueError if the value is not allowed in a configuration. Values must have a JSON type, and strings must
    not contain null characters or surrogates. The limits are MOST_VALUES values and DEEPEST levels of nesting."""
    left, count = [(value, 0)], 0
    while left:
        (here, depth), count = left.pop(), count + 1
        if count > MOST_VALUES or depth > DEEPEST:
            raise ValueError(f"a configuration can have at most {MOST_VALUES:,} values and {DEEPEST} levels of nesting")
        if isinstance(here, Mapping):
            left += [(inner, depth + 1) for pair in here.items() for inner in pair]
        elif isinstance(here, list | tuple):
            left += [(inner, depth + 1) for inner in here]
        elif isinstance(here, str):
            if "\0" in here or any("\ud800" <= character <= "\udfff" for character in here):
                raise ValueError(f"{here[:80]!r} must not contain null characters or invalid Unicode")
        elif not isinstance(here, bool | int | float | None):
            raise ValueError(f"{here!r} must not be a {type(here).__name__}. Quote the value to get a string")


# ---------------------------------------------------------------------------------------------------- amounts
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)?|[eE]([+-]?[0-9]{1,2}))")
UNITS = {"": Decimal(1)} | {unit: Decimal(1000) ** n for n, unit in zip(range(-3, 0), "num", strict=True)}
UNITS |= {unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", 1)}


def quantity(text: str) -> Decimal:
    """Convert a Kubernetes quantity such as 250m, 2 or 512Mi to a number. Raises ValueError for other strings."""
    found = NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a Kubernetes quantity such as 250m, 2 or 1Gi, got {text!r}")
    number, unit, exponent = found.groups()
    return Decimal(number) * UNITS[unit or ""] * Decimal(10) ** int(exponent or 0)


OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""Pattern of names of Kubernetes objects."""


def object_names(variable: str, environment: Mapping[str, str], most: int = 20) -> list[str]:
    """Return the names of Kubernetes objects in a variable, which are separated by commas. Raises ConfigError for an
    invalid name, or for more than `most` names."""
    text = environment.get(variable, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) > most or not all(map(OBJECT_NAME.fullmatch, names)):
        expected = (
            "the name of a Kubernetes object" if most == 1 else "names of Kubernetes objects, separated by commas"
        )
        raise ConfigError.at(f"{variable} must be {expected}, got {text!r}")
    return names


def need_plain(numbers: Iterable[str]) -> None:
    """Raise ValueError for numbers with underscores or non-ASCII digits, which Python would accept."""
    if odd := next((number for number in numbers if "_" in number or not number.isascii()), None):
        raise ValueError(f"{odd[:100]!r} must contain only ASCII digits, without underscores")


# ------------------------------------------------------------------------------------------ addresses and paths
SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]|s3:|s3//|s3$", re.IGNORECASE)
SERVER = re.compile(r"[a-z0-9.-]+:\d+(/|$)", re.IGNORECASE)
"""Patterns of the beginning of an address: a scheme with a slash (even s3:/bucket, or s3 alone), or a server with a
port. To name a folder that matches a pattern, write a path such as ./run-12:30."""
AT_HOME = re.compile(r"((?:sqlite(?:\+\w+)?:///|file:(?://)?)?)(~[^/]*|\$HOME\b|\$\{HOME\})")


def is_address(text: str) -> bool:
    """Return whether a string is an address, even if misspelt. All other strings are names of folders."""
    return "://" in text or any(how.match(text) for how in (SCHEME, SERVER))


def is_http(address: str) -> bool:
    """Return whether a string is the address of a server, such as http://host:port."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def at_home(path: str) -> str:
    """Replace `~`, `~user` or `$HOME` at the beginning of a path, or after `sqlite:///` or `file://`, by the home
    folder. Raises ConfigError if the user does not exist."""
    if (match := AT_HOME.match(path)) is None:
        return path
    scheme, name = match.groups()
    name = "~" if "HOME" in name and name[0] == "$" else name
    if (home := os.path.expanduser(name)) == name:
        raise ConfigError(f"{path!r} contains {name}, but this user does not exist. Write ./{name} for a folder")
    return f"{scheme}{home}{path[match.end() :]}"


def path_of(text: str | os.PathLike[str]) -> Path:
    """Return a Path with `~` or `$HOME` replaced by the home folder. Raises ConfigError if the user does not exist, or
    if the path is not valid UTF-8, because logs and JSON could not show it."""
    name = os.fspath(text)
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ConfigError(f"the path {printable(name)} must be valid UTF-8")
    return Path(at_home(name))

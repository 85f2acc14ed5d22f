"""Texts that users write: YAML, amounts such as 512Mi, addresses and paths."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_BOOL, _TEXT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
MOST_VALUES, DEEPEST = 100_000, 50
"""The most values in a file of parameters, and the deepest one inside others: a few lines of YAML's aliases can stand
for more than fits into memory."""


class _Yaml(yaml.SafeLoader):
    """YAML as people read it: 1e-3 is a number and 012 is twelve (PyYAML follows YAML 1.1: a string, and ten); the
    key `on` is text (PyYAML: true); a key given twice is an error, where the second would silently win."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - that is how PyYAML has it
        first: [(tag, pattern) for tag, pattern in pairs if tag not in (_INT, _FLOAT)]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        for key, _ in node.value:
            if key.tag == _BOOL:
                key.tag = _TEXT
        return super().construct_mapping(node, deep)


class _Writer(yaml.SafeDumper):
    """Quotes a text that is something else for `_Yaml` or for YAML 1.1, as others read it."""


class _Line(_Writer):
    """Quotes every text, as JSON does."""


for _kind in (_Yaml, _Writer, _Line):
    _kind.add_implicit_resolver(_INT, re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
    _kind.add_implicit_resolver(
        _FLOAT,
        re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
        list("-+0123456789."),
    )
_Line.add_representer(str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style='"'))
_Yaml.add_constructor(_INT, lambda loader, node: int(node.value, 10))


def read_yaml(text: str) -> Any:
    """YAML as `params.yaml` and `--set` have it. Raises yaml.YAMLError."""
    try:
        value = yaml.load(text, _Yaml)  # noqa: S506 - a SafeLoader
        check_plain(value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A tag that lies, a number of 5000 digits.
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
    except yaml.YAMLError as error:  # which names the text as if it were a file
        raise yaml.YAMLError(str(error).replace('in "<unicode string>", ', "in ")) from error
    return value


def comment_of(text: str) -> str:
    """The first comment in YAML; empty: it has none. Raises yaml.YAMLError."""
    end = 0
    for token in yaml.scan(text, _Yaml):
        between = text[end : token.start_mark.index]
        if "#" in between:
            return between[between.index("#") :].strip()
        end = token.end_mark.index
    return ""


def write_yaml(value: Any, *, sort_keys: bool = False) -> str:
    """Plain data as YAML, from which `read_yaml` reads the same."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=sort_keys)


def in_line(value: Any) -> str:
    """Plain data as `--set` has them after the sign: `write_yaml` in one line."""
    text = yaml.dump(value, Dumper=_Line, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").strip()


def check_plain(value: Any) -> None:
    """Raises ValueError for what a configuration cannot hold: what JSON cannot say, texts that no file or program
    takes, more than MOST_VALUES (those that aliases repeat counted each time) or deeper ones than DEEPEST."""
    left, count = [(value, 0)], 0
    while left:
        (here, depth), count = left.pop(), count + 1
        if count > MOST_VALUES or depth > DEEPEST:
            raise ValueError(f"more than {MOST_VALUES:,} values, or one inside another {DEEPEST} deep")
        if isinstance(here, Mapping):
            left += [(inner, depth + 1) for pair in here.items() for inner in pair]
        elif isinstance(here, list | tuple):
            left += [(inner, depth + 1) for inner in here]
        elif isinstance(here, str):
            if "\0" in here or any("\ud800" <= character <= "\udfff" for character in here):
                raise ValueError(f"{here[:80]!r} is no text: it holds a null character, or bytes of no encoding")
        elif not isinstance(here, bool | int | float | None):
            raise ValueError(f"{here!r} is a {type(here).__name__}; where a text is meant, put it into quotes")


NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)?|[eE]([+-]?[0-9]{1,2}))")
UNITS = {"": Decimal(1)} | {unit: Decimal(1000) ** n for n, unit in zip(range(-3, 0), "num", strict=True)}
UNITS |= {unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", 1)}


def quantity(text: str) -> Decimal:
    """The number that an amount stands for. Raises ValueError for other text."""
    found = NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"an amount as Kubernetes writes it is expected (250m, 2, 1Gi), got {text!r}")
    number, unit, exponent = found.groups()
    return Decimal(number) * UNITS[unit or ""] * Decimal(10) ** int(exponent or 0)


def need_plain(numbers: Iterable[str]) -> None:
    """Raises ValueError for a number with an underscore, or with digits of another script: Python reads 0_5 as 5."""
    if odd := next((number for number in numbers if "_" in number or not number.isascii()), None):
        raise ValueError(f"{odd[:100]!r}, which is no number")


SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]|s3:|s3//", re.IGNORECASE)
SERVER = re.compile(r"[a-z0-9.-]+:\d+(/|$)", re.IGNORECASE)
"""How a text begins that somebody wrote as an address: a scheme and a slash (s3:/bucket, with one slash too few), or a
server and its port. A folder of such a name (night-12:30) is given as a path (./night-12:30)."""


def is_meant(text: str) -> bool:
    """Whether the text is an address, or was meant as one; else it is the name of a folder."""
    return "://" in text or any(how.match(text) for how in (SCHEME, SERVER))


AT_HOME = re.compile(r"((?:sqlite(?:\+\w+)?:///|file:(?://)?)?)(~[^/]*)")
"""A path that begins with a home folder, alone or in an address of a file."""


def at_home(path: str) -> str:
    """Replace `~` or `~user` at the beginning of a path, also of one in `sqlite:///` or `file://`, by the home folder.
    Raises ConfigError if there is no such user."""
    if (match := AT_HOME.match(path)) is None:
        return path
    scheme, name = match.groups()
    if (home := os.path.expanduser(name)) == name:
        raise ConfigError(f"{name} is not the home folder of a user of this machine, got {path!r}. Name it as ./{name}")
    return f"{scheme}{home}{path[match.end() :]}"


def path_of(text: str | os.PathLike[str]) -> Path:
    """Return the path of an option or an argument, with the home folder for `~`. Raises ConfigError as `at_home`."""
    return Path(at_home(os.fspath(text)))


def folder_hint(text: str) -> str:
    """For the error about a text that was meant as an address: how a folder is given whose name looks like a server and
    its port; empty for any other text."""
    is_server = SERVER.match(text) and not SCHEME.match(text)
    return f" (a folder of that name is given as ./{text})" if is_server else ""


PERCENT = ("accuracy", "accuracy_all", "top5")
"""By name, as in histories, where they are between 0 and 1."""

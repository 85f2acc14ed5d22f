"""Plain data - mappings, lists, texts, numbers - and YAML as people read it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

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

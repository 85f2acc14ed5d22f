"""The schema as text: `params.yaml` with every parameter, its default and its meaning.

The meaning of a parameter is the text below its field; its possible values come from its type or from the registry.
`python -m components.describe` writes the file, the site shows it, and a test compares both with the schema.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

from fl_engine.algorithms import CONTRACT as ALGORITHM
from fl_engine.codecs import CODECS
from fl_engine.core.fields import is_model
from fl_engine.core.registry import Contract
from fl_engine.datasets import DATASETS
from fl_engine.fleet.devices import FLEETS
from fl_engine.models import MODELS
from fl_engine.models.build import FROM_DATA, INIT, WARM_START
from flexfleet.config.schema import Config

WIDTH = 120
NAMES: dict[str, Mapping[str, Any]] = {
    "dataset.name": DATASETS, "model.name": MODELS, "algorithm.name": ALGORITHM.registry, "codec.down.name": CODECS,
    "codec.up.name": CODECS,
}  # fmt: skip
"""Parameters that also take package.module:NAME, for a user's own."""
HEAD = """\
All parameters with their defaults: FlexFL on scikit-learn's handwritten digits. `flexfleet run`, `dvc repro` and
`python -m flexfleet.pipeline.<step>` read this file; `--set a.b=value` overrides a value. An unknown name is an error.
The schema is flexfleet/config/schema.py: `make generated` writes this file from it."""


def params_yaml() -> str:
    """The text of params.yaml."""
    return "\n".join([*(f"# {line}" for line in HEAD.splitlines()), *_section(Config(), "", "")]) + "\n"


def about(path: str) -> str:
    """What the parameter of this dotted name means, and its possible values if they are few."""
    if path in NAMES:
        return f"{', '.join(sorted(NAMES[path]))}, or package.module:NAME."
    here: Any = Config
    *parents, last = path.split(".")
    for part in parents:
        hint = _hints(here)[part]
        if _registered(hint):  # what is chosen by name is told as one
            return _about(here, part, path)
        here = _bare(hint)
    return _about(here, last, path)


def choices(path: str) -> tuple[str, ...]:
    """The values that a parameter can have, if its type lists them."""
    here: Any = Config
    for part in path.split(".") if path not in NAMES else ():
        here = _hints(_bare(here))[part]
    return _choices(here)


# ------------------------------------------------------------------------------------------------- params.yaml
def _section(value: Any, prefix: str, indent: str) -> Iterator[str]:
    """The lines of a section; `value` holds its defaults, `prefix` is its dotted name followed by a dot."""
    kind: Any = type(value)
    for name in _hints(kind):
        path, default = f"{prefix}{name}", getattr(value, name)
        if path in ("model", "algorithm"):
            yield from ("", f"{name}:", *_named(path, default["name"]))
        elif isinstance(default, BaseModel) or name == "training":
            yield from ("", *_line(f"{name}:", _class_text(type(default)), indent))
            yield from _section(default, f"{path}.", f"{indent}  ")
        elif path == "fleet.tiers":
            yield from _line(f"{name}:", _about(kind, name, path), indent, above=True)
            for tier in default:
                told = {f.name: each for f in fields(tier) if (each := getattr(tier, f.name)) is not None}
                yield f"{indent}  - {_value(told)}"
        else:
            # The key `on` in quotes: without them it is true for readers of YAML 1.1.
            yield from _line(f"{_value(name)}: {_value(default)}", _about(kind, name, path), indent)


def _named(section: str, name: str) -> Iterator[str]:
    """The name of the default network or algorithm, and its options as comments."""
    yield from _line(f"name: {name}", about(f"{section}.name"), "  ", above=True)
    kind: Any = NAMES[f"{section}.name"][name]
    if section == "model":
        yield from _line(f"{INIT}: null", WARM_START, "  # ")
    yield f"  # The options of {name}; those of another are the fields of its class, in fl_engine/{section}s/."
    for field in fields(kind):
        if field.name not in ("training", *FROM_DATA):
            yield from _line(f"{field.name}: {_value(field.default)}", _about(kind, field.name, ""), "  # ")


def _line(text: str, meaning: str, indent: str, above: bool = False) -> list[str]:
    """`key: value # meaning`; a long meaning gets its own lines above it."""
    short = f"{indent}{text} # {meaning}" if meaning else f"{indent}{text}"
    if len(short) <= WIDTH and not above:
        return [short]
    # The meaning of an option that is itself a comment is indented by two more blanks, so that its key stands out.
    lead = f"{indent}  " if indent.endswith("# ") else f"{indent}# "
    return [*textwrap.wrap(meaning, WIDTH, initial_indent=lead, subsequent_indent=lead), f"{indent}{text}"]


def _value(value: Any) -> str:
    """In one line, as YAML."""
    if is_dataclass(value):
        value = {"name": getattr(value, "name", "")}
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(inner)}' for key, inner in value.items())}}}"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


# ------------------------------------------------------------------------------------------------- the meaning
def _about(kind: type, name: str, path: str) -> str:
    """The text below a field, after what its type says of its values."""
    if path in NAMES:
        return about(path)
    hint, text = _hints(kind)[name], _text(kind, name)
    if path == "fleet.tiers":
        return f"{text} The names: {', '.join(FLEETS)}."
    listed = _choices(hint)
    if not all(word in text for word in listed):
        return f"{_listed(listed, 'or')}. {text}".strip()
    if get_origin(_bare(hint)) is dict and is_model(each := get_args(_bare(hint))[1]):
        return f"{text} Each: {{{', '.join(each.model_fields)}}}."
    if registry := _registered(hint) or NAMES.get(f"{path}.name", {}):
        by_name = [f"{own}{_options(member)}" for own, member in registry.items()]
        return f"{', '.join(by_name)}, or one of your own (package.module:NAME). {text}".strip()
    return text


def _registered(hint: Any) -> Mapping[str, type]:
    """What a field may name, if its annotation (or one beside None, or of a list's elements) has a contract."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else (hint,)
    noted = (note for member in members if get_origin(member) is Annotated for note in get_args(member)[1:])
    return next((note.registry for note in noted if isinstance(note, Contract)), {})


def _choices(hint: Any) -> tuple[str, ...]:
    """The choices of Literal["a", "b"], also inside of a union with other Literals or None."""
    bare = _bare(hint)
    if get_origin(bare) is Literal:
        return tuple(get_args(bare)) if len(get_args(bare)) > 1 and isinstance(get_args(bare)[0], str) else ()
    members = [m for m in get_args(bare) if m is not type(None)] if get_origin(bare) in (Union, UnionType) else []
    if not members or any(get_origin(_bare(member)) is not Literal for member in members):
        return ()
    return tuple(word for member in members for word in get_args(_bare(member)))


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _options(member: Any) -> str:
    names = [field.name for field in fields(member) if field.name != "name"]
    return f" ({', '.join(names)})" if names else ""


def _listed(words: Sequence[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    known = kind.model_fields if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]
    return {name: hints[name] for name in known}


def _class_text(kind: type) -> str:
    return " ".join((ast.get_docstring(_tree(kind)) or "").split())


def _text(kind: type, name: str) -> str:
    """The text below a field; where the class says none, that of the class that it has the field from."""
    told = (_texts(each).get(name) for each in kind.__mro__ if each is kind or is_dataclass(each))
    return next((text for text in told if text), "")


@cache
def _texts(kind: type) -> dict[str, str]:
    """The text below each field of a class, in one line. Python does not keep it, so it is read from the source."""
    texts = {}
    try:
        lines = _tree(kind).body
    except OSError:  # of a class that code has made, or whose source is not there
        return {}
    for pair in pairwise(lines):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


@cache
def _tree(kind: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree

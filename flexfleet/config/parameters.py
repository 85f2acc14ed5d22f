"""Describe all parameters for `flexfleet params`, params.yaml, the forms of the pipelines and the documentation.

The description of a parameter is the docstring of its field. The options of registered components (networks,
algorithms, codecs, schedules) are also parameters.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from fl_engine.algorithms import ALGORITHMS, PRESETS
from fl_engine.algorithms import CONTRACT as ALGORITHM
from fl_engine.codecs import CODECS
from fl_engine.core.errors import ConfigError, did_you_mean
from fl_engine.core.fields import Moves, is_model
from fl_engine.core.registry import Contract
from fl_engine.datasets import DATASETS
from fl_engine.models import MODELS
from fl_engine.models.build import FROM_DATA, INIT, WARM_START, model_kind
from fl_engine.models.traced.family import ModuleFamily
from flexfleet.config.schema import UNSET, Config, moves

SECTIONS: dict[str, Mapping[str, Any]] = {
    "model": MODELS, "algorithm": ALGORITHMS, "codec.down": CODECS, "codec.up": CODECS,
}  # fmt: skip
"""Map each section with a `name` to its registered components. All sections also accept package.module:NAME."""
NAMES = {f"{path}.name": known for path, known in SECTIONS.items()}
NAMES |= {"dataset.name": DATASETS, "algorithm.name": ALGORITHM.registry}
"""Map each parameter that selects a registered component to all components that it can select."""
OWN_MODULE = "package.module:NAME"
"""Value of `Parameter.of` for the options of every user-defined `nn.Module`."""
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
INDEX = re.compile(r"(\.\d+)+$")
"""Pattern of the index of a list's element at the end of a dotted name."""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Parameter:
    name: str
    """Dotted name."""
    of: str
    """Name of the component that has this option, such as `heterofl`; empty for all other parameters."""
    type: str
    default: str
    """The default as YAML."""
    choices: tuple[str, ...]
    """All possible names or values; empty if they cannot be listed."""
    meaning: str

    @property
    def section(self) -> str:
        return self.name.partition(".")[0] if "." in self.name else ""


def everything(config: Config | None = None) -> list[Parameter]:
    """Return all parameters, section by section. Options of all registered components, and of the configured algorithm
    and network, are included."""
    config = config or Config()
    algorithm, model = config.algorithm, config.model
    rows = [*_section(Config(), ""), *_options("model", {model["name"]: model_kind(model)})]
    if algorithm["name"] not in PRESETS:
        rows += _options("algorithm", {algorithm["name"]: ALGORITHM.of_section(algorithm)})
    return list(dict.fromkeys(rows))


def check_space(config: Config) -> None:
    """Raise ConfigError if a name in `tune.space` is unknown or does not change results. The options of all registered
    components are known names, because runs with different algorithms can share a params.yaml."""
    space, searched = config.tune.space, (Moves.RESULT, Moves.LENGTH)
    if clash := sorted(path for path in space if path == "seed" or moves(path) not in searched):
        message = f"`tune.space` must contain only parameters that change results, got {', '.join(clash)}"
        raise ConfigError(message, path="tune.space")
    known = {row.name for row in everything(config)} if space else set()
    for path in space:
        if INDEX.sub("", path) not in known:
            message = f"`tune.space`: unknown parameter {path!r}{did_you_mean(path, known)}. Run `flexfleet params`"
            raise ConfigError(message, code="config.unknown", path="tune.space")


def found(word: str, among: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters whose name or description contains a word, ignoring case. Parameters whose name or
    component is this word (`mu`, `heterofl`, `rounds.stop`) come first."""
    word = word.casefold()
    rows = [
        row for row in among if any(word in text.casefold() for text in (row.name, row.of, row.meaning, *row.choices))
    ]
    return sorted(rows, key=lambda row: word not in (row.name, *row.name.split("."), row.of))


def in_use(config: Config, among: Iterable[Parameter]) -> list[Parameter]:
    """Return all parameters except the options of components that the configuration does not use."""
    names = {"", *_names(config.model_dump(mode="json"))}
    preset = PRESETS.get(config.algorithm["name"])
    if preset:
        names.add(preset.algorithm)
        fixed = {(f"algorithm.{key}", preset.algorithm) for key in preset.options}
        among = [row for row in among if (row.name, row.of) not in fixed]
    return [row for row in among if row.of in names]


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str):
            yield value["name"]
        for inner in value.values():
            yield from _names(inner)


def _section(value: Any, prefix: str) -> Iterator[Parameter]:
    kind: Any = type(value)
    for name in hints(kind):
        path, default = f"{prefix}{name}", getattr(value, name)
        if path == "schema_version":
            continue
        if path in SECTIONS:
            names = tuple(sorted(NAMES[f"{path}.name"]))
            yield Parameter(f"{path}.name", "", "name", default["name"], names, described(kind, name, path))
            if path == "algorithm":
                yield from _preset_options()
            if path == "model":
                yield Parameter(f"{path}.{INIT}", "", "text, or null", "null", (), WARM_START)
                yield from _options(path, {OWN_MODULE: ModuleFamily})
            yield from _options(path, SECTIONS[path])
        elif isinstance(default, BaseModel) or path == "training":
            yield from _section(default, f"{path}.")
        else:
            yield from _row(path, "", kind, name, in_yaml(default))


def _row(path: str, of: str, kind: Any, name: str, default: str) -> Iterator[Parameter]:
    """Yield a parameter, and then the options of all components that the parameter can select."""
    hint = hints(kind)[name]
    registry = registered(hint)
    listed = tuple(sorted(NAMES[path])) if path in NAMES else choices(hint) or tuple(registry)
    yield Parameter(path, of, _type(hint), default, listed, described(kind, name, path))
    yield from _options(path, registry)


def _preset_options() -> Iterator[Parameter]:
    """Yield the options that presets set. The default of an option is the preset's value."""
    for name, preset in sorted(PRESETS.items()):
        for row in _options("algorithm", {name: ALGORITHMS[preset.algorithm]}):
            key = row.name.removeprefix("algorithm.")
            if key in preset.options:
                yield replace(row, default=in_yaml(preset.options[key]))


def _options(path: str, registry: Mapping[str, Any]) -> Iterator[Parameter]:
    for own, kind in sorted(registry.items()):
        for field in fields(kind):
            if field.name in ("name", "training", *FROM_DATA):
                continue
            default = field.default_factory() if callable(field.default_factory) else field.default
            shown = "required" if default is MISSING else in_yaml(default)
            yield from _row(f"{path}.{field.name}", own, kind, field.name, shown)


def in_yaml(value: Any) -> str:
    """Format a value as YAML in one line."""
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


@cache
def hints(kind: Any) -> dict[str, Any]:
    """Return {field: type}, in the order of the fields."""
    found = get_type_hints(kind, include_extras=True)
    known = kind.model_fields if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]
    return {name: found[name] for name in known}


def registered(hint: Any) -> Mapping[str, type]:
    """Return the registry of the components that a field can select, as annotated in the field's type."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else (hint,)
    noted = (note for member in members if get_origin(member) is Annotated for note in get_args(member)[1:])
    return next((note.registry for note in noted if isinstance(note, Contract)), {})


def choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a Literal type, or of all Literal types in a union. None is ignored."""
    bare = _bare(hint)
    union = get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)
    members = [_bare(member) for member in union if member is not type(None)]
    if any(get_origin(member) is not Literal for member in members):
        return ()
    words = tuple(word for member in members for word in get_args(member))
    return words if len(words) > 1 and isinstance(words[0], str) else ()


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _type(hint: Any) -> str:
    """Describe a type in words, such as `whole number >= 1` or `list of text, or null`."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        if any(hasattr(note, "registry") for note in notes):
            return "name and options"
        return " ".join([_type(inner), *_bounds(notes)])
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of the choices" if len(inside) > 1 else str(inside[0])
    if origin in (Union, UnionType):
        return ", or ".join(_type(each) for each in inside)
    if origin in (tuple, list):
        return f"list of {_type(inside[0])}" if inside[-1] is Ellipsis or origin is list else "list"
    if origin is dict or is_dataclass(hint) or is_model(hint):
        return "mapping"
    return WORDS.get(hint, "value")


def _bounds(notes: Iterable[Any]) -> list[str]:
    limits = [limit for note in notes for limit in getattr(note, "metadata", ())]
    bounds = [f"{sign} {getattr(each, key):g}" for each in limits for key, sign in BOUNDS.items() if hasattr(each, key)]
    return [" and ".join(bounds)] if bounds else []


def described(kind: type, name: str, path: str) -> str:
    """Return the docstring of a field in a class or in its base classes. If the docstring omits a possible value, all
    values are prepended."""
    hint = hints(kind)[name]
    texts = (_texts(each).get(name) for each in kind.__mro__ if each is kind or is_dataclass(each))
    text = next(filter(None, texts), "")
    section = path.removesuffix(".name")
    if section in ("dataset", "model", "algorithm"):
        return f"A name (`flexfleet list {section}s`), or {OWN_MODULE}."
    if get_origin(_bare(hint)) is dict and is_model(each := get_args(_bare(hint))[1]):
        return f"{text} Each: {{{', '.join(each.model_fields)}}}."
    if registry := registered(hint) or SECTIONS.get(path, {}):
        return f"{', '.join(registry)}, or {OWN_MODULE}. {text}".strip()
    listed = choices(hint)
    if all(word in text for word in listed):
        return text
    return f"{', '.join(listed[:-1])} or {listed[-1]}. {text}".strip()


@cache
def _texts(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a class, as written in the source code. The library pydantic reads
    docstrings of fields only for its own models, not for dataclasses."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:  # the class has no source file
        return {}
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for pair in pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


WIDTH = 120
HEAD = """\
All parameters with their defaults: FlexFL on scikit-learn's handwritten digits. `flexfleet run`, `dvc repro` and
`python -m flexfleet.pipeline STEP` read this file, and `--set a.b=value` overrides a value. `default` stands for the
value in brackets, and is ignored if another network or algorithm that you choose does not have the option.
`flexfleet params WORD` explains options, e.g. `flexfleet params heterofl`. `make generated` writes this file."""


def params_yaml() -> str:
    """Return the contents of params.yaml. Options of the default network and algorithm have the value `default`. Their
    values are comments, because another network or algorithm has other options and defaults."""
    config, section = Config(), ""
    lines = [*(f"# {line}" for line in HEAD.splitlines()), f"schema_version: {config.schema_version}"]
    for row in _section(config, ""):
        if row.of not in ("", config.model["name"], config.algorithm["name"]):
            continue
        if row.section != section:
            section = row.section
            about = type(getattr(config, section)).__doc__ if section not in ("model", "algorithm") else ""
            lines += ["", *_line(f"{section}:", " ".join((about or "").split()), "")]
        key, dot, _ = row.name.removeprefix(f"{section}.").partition(".")  # such as codec.up.name
        # The key `on` needs quotes, because YAML 1.1 parsers read an unquoted `on` as true.
        text = f"{key}: {{name: {row.default}}}" if dot else f"{in_yaml(key)}: {row.default}"
        if row.name == "fleet.tiers":
            lines += _line("tiers:", row.meaning, "  ")
            for tier in map(to_jsonable_python, config.fleet.tiers):
                lines.append(f"    - {in_yaml({name: each for name, each in tier.items() if each is not None})}")
        elif row.of or row.name == f"model.{INIT}":
            lines += _line(f"{in_yaml(key)}: {UNSET}", row.meaning, "  ", f"({row.default})")
        else:
            lines += _line(text, row.meaning, "  " if section else "")
    return "\n".join(lines) + "\n"


def _line(text: str, meaning: str, indent: str, value: str = "") -> list[str]:
    """Return the lines for `key: value # meaning`. If `meaning` is long, it is written above the key. `value` is a
    comment that always stands beside the key."""
    comment = f"{value} {meaning}".strip()
    short = f"{indent}{text} # {comment}" if comment else f"{indent}{text}"
    if len(short) <= WIDTH:
        return [short]
    lead = f"{indent}# "
    beside = f"{indent}{text} # {value}" if value else f"{indent}{text}"
    return [*textwrap.wrap(meaning, WIDTH, initial_indent=lead, subsequent_indent=lead), beside]

"""Every parameter as a row: for `flexfleet params`, params.yaml, the forms of the pipelines and the documentation.

The meaning of a parameter is the text below its field; its possible values come from its type or from a registry. The
options of what is chosen by name - a network, an algorithm, its selection, a codec, a schedule - are rows too: `of`
says whose options they are.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain, pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

from fl_engine.algorithms import ALGORITHMS, PRESETS
from fl_engine.algorithms import CONTRACT as ALGORITHM
from fl_engine.codecs import CODECS
from fl_engine.core.fields import is_model
from fl_engine.core.registry import Contract
from fl_engine.datasets import DATASETS
from fl_engine.models import MODELS
from fl_engine.models.build import FROM_DATA, INIT, WARM_START, model_kind
from fl_engine.models.traced.family import ModuleFamily
from flexfleet.config.schema import Config

SECTIONS: dict[str, Mapping[str, Any]] = {
    "model": MODELS, "algorithm": ALGORITHMS, "codec.down": CODECS, "codec.up": CODECS,
}  # fmt: skip
"""Sections with a `name`, and what it may name. All also take package.module:NAME."""
NAMES: dict[str, Mapping[str, Any]] = {
    "dataset.name": DATASETS, "model.name": MODELS, "algorithm.name": ALGORITHM.registry, "codec.down.name": CODECS,
    "codec.up.name": CODECS,
}  # fmt: skip
"""Parameters with registered names, and the names."""
OWN = "or package.module:NAME"
OWN_MODULE = "package.module:NAME"
"""Whose options those of any `nn.Module` are, for which no name is registered."""
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Parameter:
    name: str
    """Dotted name."""
    of: str
    """Whose option it is (`heterofl`); empty: it is not an option of a named thing."""
    type: str
    default: str
    """As YAML."""
    choices: tuple[str, ...]
    """Names or values that it can have; empty: too many to list, or none."""
    meaning: str

    @property
    def section(self) -> str:
        return self.name.partition(".")[0] if "." in self.name else ""


def everything(config: Config | None = None) -> list[Parameter]:
    """Return all parameters, section by section, and all options of everything registered; also those of a user's own
    algorithm or network that the configuration names."""
    config = config or Config()
    algorithm, model = config.algorithm, config.model
    named = {} if algorithm["name"] in PRESETS else {algorithm["name"]: ALGORITHM.of_section(algorithm)}
    own = chain(
        _options("algorithm", named),
        _options("model", {model["name"]: model_kind(model)}),
    )
    return list(dict.fromkeys([*_section(Config(), ""), *own]))


def found(word: str, among: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that contain a word, in upper or lower case: first those with it as a name (`mu`,
    `heterofl`, `rounds.stop`), then those with it inside a name, a choice or the meaning."""
    asked = word.casefold()
    named, others = [], []
    for each in among:
        if asked in (each.name, *each.name.split("."), each.of):
            named.append(each)
        elif any(asked in text.casefold() for text in (each.name, each.of, each.meaning, *each.choices)):
            others.append(each)
    return [*named, *others]


def in_use(config: Config, among: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that this configuration has, without the options of what it does not name."""
    named: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            if isinstance(value.get("name"), str):
                named[path] = value["name"]
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))

    walk(config.model_dump(mode="json"), "")
    preset = PRESETS.get(config.algorithm["name"])
    set_by_preset = {f"algorithm.{key}" for key in preset.options} if preset else set()

    def used(each: Parameter) -> bool:
        parent = each.name.rpartition(".")[0]
        if preset and parent == "algorithm" and each.of == preset.algorithm:
            return each.name not in set_by_preset
        return each.of in ("", named.get(parent))

    return [each for each in among if used(each)]


# ------------------------------------------------------------------------------------------------- rows
def _section(value: Any, prefix: str) -> Iterator[Parameter]:
    kind: Any = type(value)
    for name, hint in hints(kind).items():
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
            registry = registered(hint)
            listed = tuple(sorted(NAMES[path])) if path in NAMES else choices(hint) or tuple(registry)
            yield Parameter(path, "", _type(hint), in_yaml(_plain(default)), listed, described(kind, name, path))
            yield from _options(path, registry)


def _preset_options() -> Iterator[Parameter]:
    """The options that presets set, with their values there."""
    for name, preset in sorted(PRESETS.items()):
        for row in _options("algorithm", {name: ALGORITHMS[preset.algorithm]}):
            key = row.name.removeprefix("algorithm.")
            if key in preset.options:
                yield replace(row, default=in_yaml(_plain(preset.options[key])))


def _options(path: str, registry: Mapping[str, Any]) -> Iterator[Parameter]:
    """The fields of everything that may be named at `path`."""
    for own, kind in sorted(registry.items()):
        for field in fields(kind):
            if field.name in ("name", "training", *FROM_DATA):
                continue
            hint = hints(kind)[field.name]
            inner, option = registered(hint), f"{path}.{field.name}"
            listed = tuple(inner) or choices(hint)
            yield Parameter(option, own, _type(hint), _default(field), listed, described(kind, field.name))
            yield from _options(option, inner)


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return in_yaml(_plain(field.default))
    return in_yaml(_plain(field.default_factory())) if field.default_factory is not MISSING else "required"


def in_yaml(value: Any) -> str:
    """Return a value as YAML in one line."""
    if is_dataclass(value):
        value = {"name": getattr(value, "name", "")}
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {in_yaml(inner)}' for key, inner in value.items())}}}"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    if is_dataclass(value) or isinstance(value, BaseModel):
        kind: Any = type(value)
        return {name: _plain(getattr(value, name)) for name in hints(kind)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------------- types
@cache
def hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields, in their order."""
    found = get_type_hints(kind, include_extras=True)
    known = kind.model_fields if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]
    return {name: found[name] for name in known}


def registered(hint: Any) -> Mapping[str, type]:
    """Return what a field may name, if its annotation (or one beside None, or of a list's elements) has a contract."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else (hint,)
    noted = (note for member in members if get_origin(member) is Annotated for note in get_args(member)[1:])
    return next((note.registry for note in noted if isinstance(note, Contract)), {})


def choices(hint: Any) -> tuple[str, ...]:
    """Return the choices of Literal["a", "b"], also inside a union with other Literals or None."""
    bare = _bare(hint)
    if get_origin(bare) is Literal:
        return tuple(get_args(bare)) if len(get_args(bare)) > 1 and isinstance(get_args(bare)[0], str) else ()
    members = [m for m in get_args(bare) if m is not type(None)] if get_origin(bare) in (Union, UnionType) else []
    if not members or any(get_origin(_bare(member)) is not Literal for member in members):
        return ()
    return tuple(word for member in members for word in get_args(_bare(member)))


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _type(hint: Any) -> str:
    """Return a type in words: `whole number >= 1`, `list of text, or null`."""
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
    said = [
        f"{sign} {getattr(limit, key):g}" for limit in limits for key, sign in BOUNDS.items() if hasattr(limit, key)
    ]
    return [" and ".join(said)] if said else []


# ------------------------------------------------------------------------------------------------- texts
def described(kind: type, name: str, path: str = "") -> str:
    """Return the text below a field, after the values that it can have unless the text names them."""
    hint, text = hints(kind)[name], text_of(kind, name)
    section = path.removesuffix(".name")
    if section in ("dataset", "model", "algorithm"):
        return f"A name (`flexfleet list {section}s`), {OWN}."
    if get_origin(_bare(hint)) is dict and is_model(each := get_args(_bare(hint))[1]):
        return f"{text} Each: {{{', '.join(each.model_fields)}}}."
    if registry := registered(hint) or SECTIONS.get(path, {}):
        return f"{', '.join(registry)}, {OWN}. {text}".strip()
    listed = choices(hint)
    if all(word in text for word in listed):
        return text
    return f"{', '.join(listed[:-1])} or {listed[-1]}. {text}".strip()


def class_text(kind: type) -> str:
    return " ".join((ast.get_docstring(_tree(kind)) or "").split())


def text_of(kind: type, name: str) -> str:
    """Return the text below a field, or the one of the base class that has the field."""
    told = (_texts(each).get(name) for each in kind.__mro__ if each is kind or is_dataclass(each))
    return next((text for text in told if text), "")


@cache
def _texts(kind: type) -> dict[str, str]:
    """The text below each field of a class. Python does not store it, so it is read from the source; pydantic does so
    for its own models only, and algorithms and networks are dataclasses."""
    texts = {}
    try:
        lines = _tree(kind).body
    except OSError:  # a class without a source file
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

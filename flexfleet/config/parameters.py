"""Every parameter as a row: for `flexfleet params`, and for the table of the documentation.

The options of what is chosen by name - a network, an algorithm, its selection, a codec, a schedule - are rows too: `of`
says whose options they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from fl_engine.algorithms import ALGORITHMS, PRESETS
from fl_engine.algorithms import CONTRACT as ALGORITHM
from fl_engine.core.fields import is_model
from fl_engine.models.build import FROM_DATA, INIT, WARM_START, model_kind
from fl_engine.models.traced.family import ModuleFamily
from flexfleet.config import document
from flexfleet.config.document import NAMES
from flexfleet.config.schema import Config

REGISTRIES = {path.removesuffix(".name"): registry for path, registry in NAMES.items() if path != "dataset.name"}
REGISTRIES["algorithm"] = ALGORITHMS
"""Sections whose options are those of what their `name` names."""
OWN_MODULE = "package.module:NAME"
"""Whose options those of any `nn.Module` are, for which no name is registered."""
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Parameter:
    name: str
    """Dotted, as --set and files have it."""
    of: str
    """Whose option it is (`heterofl`); empty: it is there whatever is named."""
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
    """All parameters, section by section, and all options of everything registered; also those of an algorithm or
    network of one's own that the configuration names."""
    config = config or Config()
    algorithm, model = config.algorithm, config.model
    named = {} if algorithm["name"] in PRESETS else {algorithm["name"]: ALGORITHM.of_section(algorithm)}
    own = chain(
        _options("algorithm", named),
        _options("model", {model["name"]: model_kind(model)}),
    )
    return list(dict.fromkeys([*_section(Config(), ""), *own]))


def found(word: str, among: Iterable[Parameter]) -> list[Parameter]:
    """The parameters in which the word occurs, in upper or lower case: first those that have it as a name (`mu`,
    `heterofl`, `rounds.stop`), then those that have it inside of a name, a choice or the meaning."""
    asked = word.casefold()
    named, others = [], []
    for each in among:
        if asked in (each.name, *each.name.split("."), each.of):
            named.append(each)
        elif any(asked in text.casefold() for text in (each.name, each.of, each.meaning, *each.choices)):
            others.append(each)
    return [*named, *others]


def in_use(config: Config, among: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that this configuration has: without the options of what it does not name."""
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
    for name, hint in document._hints(kind).items():
        path, default = f"{prefix}{name}", getattr(value, name)
        if path == "schema_version":
            continue
        if path in REGISTRIES:
            registry = REGISTRIES[path]
            about = document.about(f"{path}.name") if path in ("model", "algorithm") else document.about(path)
            names = tuple(sorted(NAMES[f"{path}.name"]))
            yield Parameter(f"{path}.name", "", "name", default["name"], names, about)
            if path == "model":
                yield Parameter(f"{path}.{INIT}", "", "text, or null", "null", (), WARM_START)
                yield from _options(path, {OWN_MODULE: ModuleFamily})
            yield from _options(path, registry)
            if path == "algorithm":
                yield from _preset_options()
        elif isinstance(default, BaseModel) or path == "training":
            yield from _section(default, f"{path}.")
        else:
            names = tuple(sorted(NAMES[path])) if path in NAMES else ()
            listed = names or document.choices(path) or tuple(document._registered(hint))
            yield Parameter(path, "", _type(hint), _text(default), listed, document.about(path))
            yield from _options(path, document._registered(hint))


def _options(path: str, registry: Mapping[str, Any]) -> Iterator[Parameter]:
    """The fields of everything that may be named at `path`."""
    for own, kind in sorted(registry.items()):
        for field in fields(kind):
            if field.name in ("name", "training", *FROM_DATA):
                continue
            hint = document._hints(kind)[field.name]
            inner, texts = document._registered(hint), document._about(kind, field.name, "")
            listed = tuple(inner) or document._choices(hint)
            yield Parameter(f"{path}.{field.name}", own, _type(hint), _default(field), listed, texts)
            yield from _options(f"{path}.{field.name}", inner)


def _preset_options() -> Iterator[Parameter]:
    """The options that presets set, with their values there."""
    for name, preset in sorted(PRESETS.items()):
        for row in _options("algorithm", {name: ALGORITHMS[preset.algorithm]}):
            key = row.name.removeprefix("algorithm.")
            if key in preset.options:
                yield replace(row, default=_text(preset.options[key]))


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return _text(field.default)
    return _text(field.default_factory()) if field.default_factory is not MISSING else "required"


def _text(value: Any) -> str:
    """A default as YAML, in one line."""
    return document._value(_plain(value))


def _plain(value: Any) -> Any:
    if is_dataclass(value) or isinstance(value, BaseModel):
        kind: Any = type(value)
        return {name: _plain(getattr(value, name)) for name in document._hints(kind)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------------- types
def _type(hint: Any) -> str:
    """A type in words: `whole number >= 1`, `list of text, or null`."""
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

"""Commands that list parameters and names, or write initial files: init, params, list."""

from __future__ import annotations

import argparse
import json
import keyword
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module, resources
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError, did_you_mean
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from flexfleet.config.parameters import Parameter


def init(args: argparse.Namespace) -> None:
    from fl_engine.storage.store import FolderStore
    from flexfleet.config.parameters import params_yaml

    name: str | None = args.algorithm
    files = {"params.yaml": params_yaml()} if name is None else algorithm_files(name, args.folder)
    written = [args.folder / file for file in files]
    if existing := [str(path) for path in written if path.exists()]:
        raise ConfigError(f"{' and '.join(existing)} must not exist. Choose another name or folder")
    for file, text in files.items():
        FolderStore(args.folder).put(file, text.encode())  # the write is atomic
    lines = [f"wrote {path}" for path in written]
    go = "" if args.folder == Path() else f"cd {shlex.quote(str(args.folder))} && "
    if name is None:
        lines.append(f"to run it: {go}flexfleet run")
    else:
        lines.append(f"to test it: {go}pytest {written[-1].name}")
        lines.append(f"to run it: {go}flexfleet run --algorithm {name}:{_class_name(name)}")
    show(json.dumps({"files": list(map(str, written))}) if args.json else "\n".join(lines))


def algorithm_files(name: str, folder: Path) -> dict[str, str]:
    """Return the contents of `<name>.py` and `test_<name>.py`. Raises ConfigError if the name is invalid or taken."""
    free = not (folder / f"{name}.py").exists()
    hides = name.isidentifier() and free and (name in sys.modules or find_spec(name) is not None)
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or hides:
        raise ConfigError(
            f"--algorithm must be the name of a new Python module, such as my_method, got {name!r}", path="algorithm"
        )
    templates = resources.files("flexfleet.files").joinpath("new")
    files = {}
    for prefix in ("", "test_"):
        text = templates.joinpath(f"{prefix}algorithm.py.in").read_text("utf-8")
        files[f"{prefix}{name}.py"] = text.replace("own_algorithm", name).replace("OwnAlgorithm", _class_name(name))
    return files


def _class_name(module: str) -> str:
    """Convert a module's name (`my_method`) to the name of its class (`MyMethod`)."""
    return "".join(part[:1].upper() + part[1:] for part in module.split("_")) or "Own"


def params(args: argparse.Namespace) -> None:
    from flexfleet.config import parameters
    from flexfleet.pipeline.prepare import config_of

    config = config_of(args)
    rows = parameters.everything(config)
    chosen = parameters.in_use(config, rows) if args.word is None else parameters.found(args.word, rows)
    if not chosen:
        known = {part for row in rows for part in (*row.name.split("."), row.of) if part}
        hint = did_you_mean(args.word, sorted(known)) or ". Run `flexfleet params` to see the parameters in use"
        raise ConfigError(f"no parameter name or description contains {args.word!r}{hint}", code="config.unknown")
    if args.json:
        show(json.dumps({"parameters": [{**asdict(row), "section": row.section} for row in chosen]}))
    else:
        show("\n".join(_lines(chosen)))


def _lines(rows: list[Parameter]) -> Iterator[str]:
    """Yield the lines to print. If several algorithms have an option with the same default, print the option once."""
    from flexfleet.config.parameters import SECTIONS

    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    owners: dict[Parameter, list[str]] = {}
    for row in rows:
        owners.setdefault(replace(row, of=""), []).append(row.of)
    before: Parameter | None = None
    for row, names in owners.items():
        if before is None or row.section != before.section:
            yield from () if before is None else ("",)
            yield f"# {row.section or 'at the top'}"
        everyone = row.section in ("algorithm", "model") and set(names) >= set(SECTIONS[row.section])
        named = "" if names == [""] else f"  (of {f'every {row.section}' if everyone else ', '.join(names)})"
        yield f"{row.name}: {row.default}{named}  [{row.type}]"
        if before is None or (row.name, row.meaning) != (before.name, before.meaning):
            text = row.meaning
            if row.choices and not all(choice in text for choice in row.choices):
                text = f"One of {', '.join(row.choices)}. {text}".strip()
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        before = row


def list_(args: argparse.Namespace) -> None:
    about = LISTS[args.what]()
    longest = max(map(len, about))
    width = max(40, shutil.get_terminal_size((120, 24)).columns - longest - 2)
    lines = (f"{name:{longest}}  {textwrap.shorten(text, width, placeholder=' ...')}" for name, text in about.items())
    show(json.dumps({args.what: about}) if args.json else "\n".join(lines))


def algorithms() -> dict[str, str]:
    from fl_engine.algorithms import ALGORITHMS, PRESETS

    presets = {name: preset.meaning for name, preset in PRESETS.items()}
    return dict(sorted(({name: _first_sentence(kind) for name, kind in ALGORITHMS.items()} | presets).items()))


def registered(module: str, registry: str) -> dict[str, str]:
    """Describe each entry of a registry, such as `CODECS` in `fl_engine.codecs`."""
    entries: Mapping[str, Any] = getattr(import_module(module), registry)
    return {name: _first_sentence(kind) for name, kind in sorted(entries.items())}


def datasets() -> dict[str, str]:
    from fl_engine.datasets import DATASETS

    return {name: source.about for name, source in sorted(DATASETS.items())}


def fleets() -> dict[str, str]:
    """Describe each fleet: each tier's fraction of devices, memory, and spread of the memory in percentage points."""
    from fl_engine.fleet.devices import FLEETS

    return {
        name: ", ".join(
            f"{100 * t.share:.3g} % {t.name} (hold {'at least ' if t.width else ''}{t.memory:.3g} %, spread "
            f"{'/'.join(f'{s:.3g}' for s in t.sigma)})"
            for t in tiers
        )
        for name, tiers in FLEETS.items()
    }


def suites() -> dict[str, str]:
    """Describe the command, the purpose and the cost of each suite."""
    from flexfleet.experiments import nightly_suite, published_suites

    paper = {name: published_suites.load(name) for name in published_suites.names()}
    found = {name: f"compare --suite: {suite.shows} Cost: {suite.cost}" for name, suite in paper.items()}
    for name in published_suites.names(nightly_suite.FOLDER):
        lines = (nightly_suite.FOLDER / f"{name}.yaml").read_text("utf-8").splitlines()
        head = takewhile(lambda line: line.startswith("#"), lines)
        found[name] = "regress --suite: " + " ".join(line.lstrip("# ") for line in head)
    return found


def backends() -> dict[str, str]:
    """Describe each value of `run.backend`."""
    return {
        "in_process": "Threads of the command train the clients",
        "processes": "Worker processes on this machine train the clients",
        "kubernetes": "Pods train the clients (section `kubernetes`)",
        "agents": "Invited devices train with their own data (section `agents`)",
    }


LISTS: Mapping[str, Callable[[], dict[str, str]]] = {
    "algorithms": algorithms,
    "models": partial(registered, "fl_engine.models", "MODELS"),
    "datasets": datasets,
    "fleets": fleets,
    "suites": suites,
    "aggregations": partial(registered, "fl_engine.aggregation", "AGGREGATIONS"),
    "selections": partial(registered, "fl_engine.selection", "SELECTIONS"),
    "codecs": partial(registered, "fl_engine.codecs", "CODECS"),
    "backends": backends,
}


def _first_sentence(kind: Any) -> str:
    """Return the first sentence of the class's docstring, or of the module's docstring if the class has none."""
    own = kind.__doc__ or ""
    if not own or own.startswith(f"{kind.__name__}("):  # @dataclass generated the docstring.
        own = sys.modules[kind.__module__].__doc__ or ""
    return re.split(r"\.\s+(?=[A-Z`])", " ".join(own.split("\n\n")[0].split()))[0].rstrip(".")

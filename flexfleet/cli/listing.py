"""The commands with which a newcomer finds what there is: init, params, list, completion."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError
from flexfleet.files.terminal import show

if TYPE_CHECKING:
    from flexfleet.config.parameters import Parameter

SHELLS = ("bash", "zsh", "fish")


# ------------------------------------------------------------------------------------------------- init
def init(args: argparse.Namespace) -> int:
    from flexfleet.files.new_files import algorithm_files, class_name, params_file, write_new

    name: str | None = args.algorithm
    written = write_new(params_file() if name is None else algorithm_files(name, args.folder), args.folder)
    if args.json:
        show(json.dumps({"files": [str(path) for path in written]}))
        return 0
    show("\n".join(f"wrote {_printable(path)}" for path in written))
    go = "" if args.folder == Path() else f"cd {shlex.quote(_printable(args.folder))} && "
    if name is None:
        show(f"to run it: {go}flexfleet run")
    else:
        show(f"to test it: {go}pytest {written[-1].name}")
        show(f"to run it: {go}flexfleet run --algorithm {name}:{class_name(name)}")
    return 0


def _printable(path: Path) -> str:
    return os.fsencode(path).decode(errors="replace")


# ------------------------------------------------------------------------------------------------- params
def params(args: argparse.Namespace) -> int:
    from flexfleet.config import parameters
    from flexfleet.pipeline.prepare import config_of

    config = config_of(args)
    rows = parameters.everything(config)
    if args.word is None:
        chosen = parameters.in_use(config, rows)
    else:
        chosen = parameters.found(args.word, rows)
        if not chosen:
            known = {part for row in rows for part in (*row.name.split("."), row.of) if part}
            close = get_close_matches(args.word, sorted(known), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else "; flexfleet params shows all that are in use"
            raise ConfigError(f"no parameter, option or meaning holds {args.word!r}{hint}")
    if args.json:
        show(json.dumps({"parameters": [{**asdict(row), "section": row.section} for row in chosen]}))
    else:
        show("\n".join(_told(chosen)))
    return 0


def _told(rows: list[Parameter]) -> Iterator[str]:
    """Yield the lines. An option that several owners share is printed once, with their names for each default."""
    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    alike: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for row in rows:
        same = (row.section, row.name, row.type, row.choices, row.meaning)
        alike.setdefault(same, {}).setdefault(row.default, []).append(row.of)
    before = None
    for (section, name, type, choices, meaning), owners in alike.items():
        if section != before:
            yield from ("",) if before is not None else ()
            before = section
            yield f"# {section}" if section else "# at the top"
        for default, of in owners.items():
            yield f"{name}: {default}{_of(name, of)}  [{type}]"
        text = meaning
        if choices and not all(choice in text for choice in choices):
            text = f"One of {', '.join(choices)}. {text}".strip()
        yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _of(name: str, owners: list[str]) -> str:
    """Return `  (of fedprox, flexfl)`; empty if the parameter belongs to no named thing."""
    from flexfleet.config.parameters import SECTIONS

    if owners == [""]:
        return ""
    section = name.rpartition(".")[0]
    everybody = section in ("algorithm", "model") and set(owners) >= set(SECTIONS[section])
    return f"  (of every {section})" if everybody else f"  (of {', '.join(owners)})"


# ------------------------------------------------------------------------------------------------- list
def list_(args: argparse.Namespace) -> int:
    about = LISTS[args.what]()
    if args.json:
        show(json.dumps({args.what: about}))
        return 0
    longest = max(map(len, about))
    room = max(40, shutil.get_terminal_size((120, 24)).columns - longest - 2)
    lines = (f"{name:{longest}}  {textwrap.shorten(text, room, placeholder=' ...')}" for name, text in about.items())
    show("\n".join(lines))
    return 0


def algorithms() -> dict[str, str]:
    from fl_engine.algorithms import ALGORITHMS, PRESETS

    presets = {name: preset.meaning for name, preset in PRESETS.items()}
    return dict(sorted((_classes(ALGORITHMS) | presets).items()))


def models() -> dict[str, str]:
    from fl_engine.models import MODELS

    return _classes(MODELS)


def datasets() -> dict[str, str]:
    from fl_engine.datasets import DATASETS

    return {name: source.about for name, source in sorted(DATASETS.items())}


def fleets() -> dict[str, str]:
    """Return the tiers of each fleet: share of the devices, memory, and its spread in points."""
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
    """Return for each suite the command that runs it, and what it shows."""
    from flexfleet.experiments.nightly_suite import names as of_nights
    from flexfleet.experiments.nightly_suite import path_of
    from flexfleet.experiments.published_suites import listed

    found = {one.name: f"compare --suite: {one.shows}" for one in listed()}
    return found | {name: f"regress --suite: {_comment(path_of(name).read_text('utf-8'))}" for name in of_nights()}


LISTS: Mapping[str, Callable[[], dict[str, str]]] = {
    "algorithms": algorithms, "models": models, "datasets": datasets, "fleets": fleets, "suites": suites
}  # fmt: skip


def _classes(registry: Mapping[str, Any]) -> dict[str, str]:
    """Return the first sentence of each class's docstring, or of its file's."""
    return {name: _first_sentence(kind) for name, kind in sorted(registry.items())}


def _first_sentence(kind: Any) -> str:
    own = kind.__doc__ or ""
    if not own or own.startswith(f"{kind.__name__}("):  # what dataclasses write themselves
        own = sys.modules[kind.__module__].__doc__ or ""
    return re.split(r"\.\s+(?=[A-Z`])", " ".join(own.split("\n\n")[0].split()))[0].rstrip(".")


def _comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)


# ------------------------------------------------------------------------------------------------- completion
def completion(args: argparse.Namespace) -> int:
    """Print the script for the shell. It lists the names of algorithms, networks and data sets as they are now."""
    import shtab

    script: argparse.ArgumentParser = args.parser()
    (commands,) = (a for a in script._actions if isinstance(a, argparse._SubParsersAction))
    names = {option: sorted(LISTS[f"{option}s"]()) for option in ("algorithm", "model", "dataset")}
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in names and action.choices is None:
                action.choices = names[action.dest]
            if action.type is Path:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    text = shtab.complete(script, shell=args.shell)
    show(json.dumps({"shell": args.shell, "script": text}) if args.json else text)
    return 0

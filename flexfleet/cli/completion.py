"""Print a completion script, which also completes names of components, parameters, suites and pipelines.

shtab generates the script from the parser. This module adds what shtab does not support: values after `=` and after a
comma, as in `--set rounds.mode=buffered` and `--algorithms flexfl,all_large`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from fl_engine.core.text import path_of
from flexfleet.cli.listing import LISTS
from flexfleet.files.terminal import show

SETTINGS, ALGORITHMS = "settings", "algorithms"

FUNCTIONS = {
    "bash": """\
_flexfleet_settings() {{
  compgen -W "{settings}" -- "$1"
}}
_flexfleet_algorithms() {{
  local last=${{1##*[,=]}}
  compgen -P "${{1%"$last"}}" -W "{algorithms}" -- "$last"
}}
""",
    "zsh": """\
_flexfleet_settings() {{
  local -a all=({settings})
  compadd "$@" -S '' -- ${{(M)all:#*=}}
  compadd "$@" -- ${{all:#*=}}
}}
_flexfleet_algorithms() {{
  compset -P '*[,=]'
  compadd "$@" -qS , -- {algorithms}
}}
""",
    "fish": """\
function _flexfleet_settings
  string split ' ' "{settings}"
end
function _flexfleet_algorithms
  set -l head (string match -r '.*[,=]' -- (commandline -ct | string replace -r '^--[^=]*=' ''))
  for name in {algorithms}
    echo "$head"$name
  end
end
""",
}
"""Functions that complete the arguments of --set and --algorithms, for each shell."""

BASH = """

# Bash splits words at `=` and `:`. Join them before shtab's function runs, and return only the part that Bash replaces.
_flexfleet() {
  local word glue= n=-1 i
  local -a words=()
  for ((i = 0; i <= COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ $word == = && ${words[n]} == --* ]]; then
      words[++n]=
    elif [[ $i -gt 0 && ( $glue || $word == [=:]* ) ]]; then
      words[n]+=$word
    else
      words[++n]=$word
    fi
    [[ $word == *[=:] ]] && glue=1 || glue=
  done
  [[ $word == [=:]* ]] && word=
  local before=${words[n]%"$word"}
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$n
  _shtab_flexfleet
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null
  COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o bashdefault -F _flexfleet flexfleet
"""


def completion(args: argparse.Namespace) -> None:
    """Print the completion script of the shell `args.shell`."""
    import shtab

    parser: argparse.ArgumentParser = args.parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    values, complete = _values(), _functions(args.shell)
    for name, command in commands.choices.items():
        for action in command._actions:
            if action.dest in complete and action.choices is None:
                action.complete = complete[action.dest]
            elif action.choices is None:
                action.choices = values.get((name, action.dest)) or (
                    values.get(("", action.dest)) if action.metavar == "VALUE" else None
                )
            if action.type is path_of:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    text = shtab.complete(parser, shell=args.shell) + (BASH if args.shell == "bash" else "")
    show(json.dumps({"shell": args.shell, "script": text}) if args.json else text)


def _functions(shell: str) -> dict[str, Any]:
    """Map the names of arguments to shtab's description of the functions that complete these arguments."""
    text = FUNCTIONS[shell].format(settings=" ".join(_settings()), algorithms=" ".join(LISTS["algorithms"]()))
    names = {"set": SETTINGS, "over": SETTINGS, "algorithms": ALGORITHMS}
    form = "(_flexfleet_{})" if shell == "fish" else "_flexfleet_{}"
    return {dest: {shell: form.format(name), "preamble": {shell: text}} for dest, name in names.items()}


def _settings() -> list[str]:
    """Return `name=` for each parameter, and `name=value` if the values of the parameter can be listed."""
    from flexfleet.config.parameters import everything

    found = (f"{row.name}={value}" for row in everything() for value in row.choices or ("",))
    return list(dict.fromkeys(found))


def _values() -> dict[tuple[str, str], Iterable[str]]:
    """Map (command, argument) to the values that can be listed. Short options of parameters have no command."""
    from flexfleet.config.dotted import SHORT
    from flexfleet.config.parameters import everything
    from flexfleet.experiments import nightly_suite, published_suites
    from flexfleet.kubeflow.retarget import names

    choices = {row.name: row.choices for row in everything()}
    nightly = published_suites.names(nightly_suite.FOLDER)
    return {
        **{("", short): choices[path] for short, path in SHORT.items()},
        ("compare", "suite"): published_suites.names(),
        ("regress", "suite"): nightly,
        ("nightly", "suite"): nightly,
        ("fetch", "names"): list(LISTS["datasets"]()),
        ("submit", "pipeline"): names(),
        ("export-pipeline", "pipeline"): names(),
    }

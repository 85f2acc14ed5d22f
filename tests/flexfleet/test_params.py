"""`flexfleet params`, `list`, `completion` and `init`: what there is, and files to begin with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import ALGORITHMS, CONTRACT
from fl_engine.core import allowed
from fl_engine.core.errors import ConfigError
from fl_engine.datasets import DATASETS
from fl_engine.fleet.devices import FLEETS
from fl_engine.models import MODELS
from flexfleet.cli import main as cli
from flexfleet.cli.listing import algorithm_files
from flexfleet.config import Config, flatten, load_config, parse
from flexfleet.config.parameters import OWN_MODULE, everything, found, in_use
from flexfleet.experiments import published_suites
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder")

ROWS = everything()
OWN_NETWORK = "from torch import nn\n\n\ndef Net(num_classes):\n    return nn.Linear(64, num_classes)\n"
BY_NAME = {(row.name, row.of): row for row in ROWS}


def test_every_parameter_of_the_schema_is_there_with_a_meaning() -> None:
    paths = set(flatten(Config())) - {"schema_version"} | {"kubernetes.pools", "tune.space"}
    known = {row.name for row in ROWS}
    assert [path for path in paths if path not in known and path.removesuffix(".name") not in known] == []
    assert [row.name for row in ROWS if not row.of and len(row.meaning) <= 5] == []
    assert len(BY_NAME) == len(ROWS)


@pytest.mark.parametrize("name", ["flexfl", "heterofl"])
def test_option_default_leaves_the_algorithm_its_own_value(name: str) -> None:
    unset = {"name": name, **dict.fromkeys(("kd_weight", "static_bn"), "default")}
    assert parse({"algorithm": unset}) == parse({"algorithm": {"name": name}})
    with pytest.raises(ConfigError) as caught:
        parse({"algorithm": {"name": name, "kd_wait": "default"}})
    assert (caught.value.code, caught.value.path) == ("config.unknown", "algorithm.kd_wait")


def words_of(node: Any, schema: Any) -> Iterator[str]:
    """The names of all parameters in a JSON schema, also of those inside lists and mappings."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    inner = [each for key in ("anyOf", "oneOf", "allOf", "prefixItems") for each in node.get(key, ())]
    inner += [node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
    for name, about in node.get("properties", {}).items():
        yield name
        inner.append(about)
    for each in inner:
        yield from words_of(each, schema)


def accepted(section: str, name: str) -> set[str]:
    """The options that a configuration takes beside this name, as its error for an unknown one lists them."""
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"{section}={{name: {name}, '0': 1}}"])
    (known,) = re.findall(r"\(known: (.*?)\)", str(refused.value))
    return set(known.split(", ")) - {"name", "training", "none"}


def test_a_word_finds_every_parameter_that_a_configuration_takes(tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text(OWN_NETWORK)
    schema = Config.model_json_schema()
    words = {*words_of(schema, schema)} - {"schema_version"}
    assert len(words) > 150
    assert [word for word in sorted(words) if not found(word, ROWS)] == []
    for section, registry in (("algorithm", ALGORITHMS), ("model", MODELS)):
        for name in (*registry, *(["mynet:Net"] if section == "model" else [])):
            takes = {f"{section}.{option}" for option in accepted(section, name)}
            of = ("", name if name in registry else OWN_MODULE)
            told = {row.name for row in ROWS if row.of in of and row.name.count(".") == 1 and row.section == section}
            assert told - {f"{section}.name"} == takes, name


def test_options_of_a_network_of_ones_own(flexfleet: Any, tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text(OWN_NETWORK)
    done = flexfleet("params", sets=["model={name: mynet:Net}"])
    assert "model.whole: false  (of mynet:Net)" in done.out, done.err


def test_choices() -> None:
    assert BY_NAME["partition.rule", ""].choices[:2] == ("iid", "dirichlet")
    assert BY_NAME["algorithm.name", ""].choices == tuple(sorted(CONTRACT.registry))
    assert BY_NAME["algorithm.server", "flexfl"].choices[:2] == ("average", "adagrad")
    assert BY_NAME["fleet.trace", ""].choices == ("lognormal", "file")


def test_what_a_configuration_uses() -> None:
    config = load_config(None, ["algorithm={name: heterofl, selection: {name: oort}}", "codec.up.name=qsgd"])
    used = in_use(config, ROWS)
    assert {row.of for row in used} == {"", "heterofl", "small_cnn", "oort", "qsgd"}
    assert ("codec.up.bits", "qsgd") in {(row.name, row.of) for row in used}


# ------------------------------------------------------------------------------------------- list
@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("algorithms", set(CONTRACT.registry)),
        ("models", set(MODELS)),
        ("datasets", set(DATASETS)),
        ("fleets", set(FLEETS)),
        ("suites", {*published_suites.names(), "digits"}),
    ],
)
def test_lists(flexfleet: Any, what: str, names: set[str]) -> None:
    done = flexfleet("list", what, "--json")
    about = json.loads(done.out)[what]
    assert set(about) == names
    assert min(map(len, about.values())) > 10
    lines = flexfleet("list", what).out.splitlines()
    assert [line.split()[0] for line in lines] == list(about)


# ------------------------------------------------------------------------------------------- completion
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(flexfleet: Any, shell: str) -> None:
    done = flexfleet("completion", shell)
    assert done.code == 0
    assert all(word in done.out for word in ("compare", "dirichlet", "heterofl", "small_cnn"))
    if shell == "bash":
        asked = "\n".join((done.out, "COMP_WORDS=(flexfleet li); COMP_CWORD=1",
                           "_shtab_flexfleet; printf '%s\\n' \"${COMPREPLY[@]}\""))  # fmt: skip
        answer = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
        assert answer.stdout.split() == ["list"], answer.stderr
    assert cli.parser().parse_args(["run", "--algorithm", "my:Own"]), "the real parser takes other names"


# ------------------------------------------------------------------------------------------- init
def test_the_parameters_are_the_defaults_with_their_meaning(flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("init", "new/place", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"files": ["new/place/params.yaml"]})
    assert load_config(tmp_path / "new/place/params.yaml") == load_config()
    assert "# Epochs that a client trains per round." in (tmp_path / "new/place/params.yaml").read_text()


@pytest.mark.parametrize("argv", [("init",), ("init", "--algorithm", "mine")])
def test_nothing_is_replaced(flexfleet: Any, tmp_path: Path, argv: tuple[str, ...]) -> None:
    assert flexfleet(*argv).code == 0
    last = max(tmp_path.iterdir())  # params.yaml, or the test
    last.write_text("mine")
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    assert last.name in refused(flexfleet(*argv))
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_one_file_in_the_way_and_none_is_written(flexfleet: Any, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("")
    assert flexfleet("init", "--algorithm", "mine").code == 2
    assert not (tmp_path / "mine.py").exists()


@pytest.mark.parametrize("name", ["my-method", "1st", "class", "a/b", "", "json", "flexfleet", "número", "__main__"])
def test_a_name_that_cannot_be_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        algorithm_files(name, tmp_path)


@pytest.mark.long
def test_the_algorithm_runs_and_its_test_passes(flexfleet: Any, tmp_path: Path, quick: list[str]) -> None:
    done = flexfleet("init", "--algorithm", "fed_mine")
    assert done.code == 0 and "flexfleet run --algorithm fed_mine:FedMine" in done.out
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fed_mine.py"]
    tested = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert " passed" in tested.stdout and "skipped" not in tested.stdout
    allowed.trusted.add("fed_mine:FedMine")
    own = CONTRACT.kind("fed_mine:FedMine")
    assert CONTRACT.missing(own) == []
    sets = [each for each in quick if not each.startswith("algorithm.")]
    ran = flexfleet("run", "--json", "-q", "--algorithm", "fed_mine:FedMine", sets=sets).ok()
    assert set(json.loads(ran.out)["metrics"]["levels"]) == {"0.5x", "0.71x", "1x"}

"""What people write: params.yaml, `--set`, suites, forms and `.dvc` pointers.

What is read is a configuration that is written and read again as it was; else a named error says the parameter or the
file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.settings import KubernetesConfig, NodePool
from flexfleet.config import Config, flatten, load_config, parse
from flexfleet.config.dotted import SHORT
from flexfleet.config.form import config_from, parameters_of, write_config
from flexfleet.experiments import nightly_suite
from flexfleet.tracking import dvc_remote
from tests.fuzz.mutations import altered, answer, anything, damaged, law, nested, texts

ROOT = Path(__file__).parents[2]
PARAMS = (ROOT / "params.yaml").read_text()
VALUES = Config().model_dump(mode="json")
NAMES = sorted(flatten(Config()))
SECTIONS = tuple(VALUES)

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(f'*a{i - 1}' for _ in range(9))}]\n" for i in range(1, 12)
)
"""A kilobyte that expands to 9^12 elements."""
ODD_YAML = (
    "", "~", "[]", "[a, b]", "seed", "seed: 1\nseed: 2", "seed: 2001-99-99", "seed: 2001-01-01", "seed: !!int x",
    "seed: !!float x", "seed: !!bool x", "seed: !!timestamp x", "seed: !!binary '*'", "seed: !!set {a, b}",
    "seed: !!python/object/apply:os.getcwd []", "seed: &a [*a]", "dataset: &a {dataset: *a}", "? [a]\n: b",
    "? {a: b}\n: c", "{[a]: b}", "<<: 1", "<<: {seed: 1}", "1: 2", "null: 2", "1.5: {a: b}", "2001-01-01: 2", "seed: =",
    "seed: " + "9" * 5000, "seed: " + "[" * 1000, "seed: {" * 1000, "---\nseed: 1\n---\nseed: 2",
    "%YAML 9.9\n---\na: b", "\t", "seed: 'a", "seed: \x07", "seed: \u2028", "model: small_cnn", "model: {name: [1]}",
    "model: {name: {}}", "seed: !!int []", "seed: !!int {}", "seed: !!float ''", "seed: !!bool []",
    "algorithm: {name: flexfl, name: x}", "model: {name: 'os:getcwd'}", "model: {name: ':'}", "model: {name: '..:x'}",
    "model: {name: 'fl_engine.core.types:Device'}", "algorithm: {name: 'fl_engine.core.types:Device'}",
    "dataset: {name: 'fl_engine.core.types:Device'}", "model: {name: 'fl_engine.core.types:ModelFamily'}",
    "algorithm: {name: 'fl_engine.training.numerics:Numerics'}",
    "model: {name: 'fl_engine.training.numerics:Numerics'}",
    "fleet: {tiers: []}", "fleet: {tiers: x}", "fleet: {tiers: {}}", "fleet: [8:1:1]", "run: {devices: []}", LAUGHS,
    "seed: &s 1\npartition: {seed: *s}", "training: {lr: 1e-3, epochs: 012}",
)  # fmt: skip


def check_round_trip(config: Config, folder: Path) -> None:
    """Check that an accepted configuration is equal after writing and reading, in both formats."""
    values = config.model_dump(mode="json")
    said = json.dumps(values)  # NaN is not equal to itself
    assert json.dumps(parse(values).model_dump(mode="json")) == said
    assert json.dumps(load_config(write_config(config, folder / "again.yaml")).model_dump(mode="json")) == said


def words(*texts: str) -> tuple[str, ...]:
    """What an error about parameters may name: the sections, and what is between dots here."""
    return (*SECTIONS, *(part for text in texts for part in text.split(".") if part))


@st.composite
def yaml_like(draw: Any, text: str) -> bytes:
    how = draw(st.sampled_from(("values", "values", "bytes", "odd", "odd section", "coding")))
    if how == "values":
        return yaml.safe_dump(draw(altered(yaml.safe_load(text))), allow_unicode=True).encode()
    if how == "bytes":
        return draw(damaged(text.encode()))
    if how == "odd":
        return draw(st.sampled_from(ODD_YAML)).encode()
    if how == "coding":
        return text.encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig"))))
    odd = draw(st.sampled_from(ODD_YAML)).replace("\n", "\n  ")
    return f"{draw(st.sampled_from(SECTIONS))}:\n  {odd}\n".encode()


@law(30)
@given(yaml_like(PARAMS))
@example(LAUGHS.encode())
def test_params_yaml_is_read_or_its_parameter_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    found = answer(lambda: load_config(path), "params.yaml", *words(), "unknown parameter", "the configuration")
    if found is not None:
        check_round_trip(found, tmp_path)


paths = (
    st.sampled_from(NAMES)
    | st.sampled_from(SECTIONS)
    | st.tuples(st.sampled_from(NAMES), st.sampled_from(("x", "", "0", "name", "low"))).map(".".join)
    | texts(odd=("", ".", "..", "seed.", ".seed", "algorithm.gammas.0", "tune.space.seed", "__class__"))
)
values = st.sampled_from(ODD_YAML) | anything.map(lambda value: json.dumps(value)) | texts(odd=("a=b", "=", "[", "{"))


@law(40)
@given(st.lists(st.tuples(paths, values).map("=".join) | texts(odd=("seed", "=", "=1")), min_size=1, max_size=3))
@example(["seed=" + "9" * 5000])
@example(["dataset.root=" + "[" * 1000])
def test_set_option_is_read_or_its_parameter_is_named(tmp_path: Path, sets: list[str]) -> None:
    told = ("--set", "the configuration")
    found = answer(lambda: load_config(None, sets), *told, *words(*(text.partition("=")[0].strip() for text in sets)))
    if found is not None:
        check_round_trip(found, tmp_path)


FORM = {
    "dataset": "digits", "model": "small_cnn", "algorithm": "flexfl", "clients": 20.0, "partition_rule": "dirichlet",
    "dirichlet_alpha": 0.6, "rounds": 40.0, "client_fraction": 0.3, "local_epochs": 5.0, "learning_rate": 0.05,
    "seed": 0.0, "mlflow_uri": "", "store_uri": "runs", "trials": 30.0,
}  # fmt: skip
ADVANCED = {
    "training.momentum": 0.5, "algorithm.kd_weight": 5.0, "run.backend": "kubernetes",
    "kubernetes.pools": {"weak": {"memory": "512Mi"}}, "tune.space": {"algorithm.kd_weight": {"low": 0.1, "high": 1.0}},
}  # fmt: skip


@law(30)
@given(altered(FORM), altered(ADVANCED))
@example(FORM, {"training.momentum": nested(60)})
@example(FORM, {"": 1})
def test_form_is_read_or_its_wrong_field_is_named(tmp_path: Path, form: Any, advanced: Any) -> None:
    if not isinstance(form, dict) or not isinstance(advanced, dict):
        return  # Kubeflow sees to that: a form is a mapping, and so is a struct
    named = words(*form, *SHORT.values(), *advanced)
    found = answer(lambda: config_from(form, advanced), "advanced", "unknown parameter", *named, kind=ConfigError)
    if found is not None:
        check_round_trip(found, tmp_path)
        again = parameters_of(found)
        if found.tracking.mlflow is None and "://" not in found.run.store:
            assert config_from(*json.loads(json.dumps(again))).partition == found.partition


SUITE = (ROOT / "flexfleet" / "experiments" / "nightly_suites" / "digits.yaml").read_text()


@law(15)
@given(yaml_like(SUITE))
@example(SUITE.replace("settings:", "settings:\n  run.store: 2001-01-01", 1).encode())
@example(b"\xff\xfe")
@example((SUITE + "\nwhen: 2001-99-99\n").encode())
@example(b"[" * 1000)
def test_a_suite_is_read_or_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    found = answer(lambda: nightly_suite.read_suite(path, nightly_suite.NightlySuite), "mine.yaml", kind=ConfigError)
    if found is not None:
        settings = [*found.settings, *(key for case in found.cases.values() for key in case.settings)]
        named = (*words(*settings), "--set", "algorithms", "seeds", "id", "label", "mine", *settings)
        prepared = answer(lambda: nightly_suite.nightly_run(path, "night", {}), *named, kind=ConfigError)
        assert prepared is None or {len(digest) for digest in prepared.tasks.values()} == {16}


POINTER = "outs:\n- md5: d41d8cd98f00b204e9800998ecf8427e.dir\n  size: 12\n  hash: md5\n  path: pool\n"


@law(40)
@given(yaml_like(POINTER))
@example(b"outs:\n- md5: 2001-99-99\n")
@example(b"[" * 1000)
@example(b"outs:\n- md5: ../../etc/passwd\n")
def test_dvc_pointer_has_a_checksum_or_is_refused(tmp_path: Path, content: bytes) -> None:
    text = content.decode(errors="replace")
    found = answer(lambda: dvc_remote.checksum(text), "not a .dvc pointer", kind=ConfigError)
    if found is not None:
        digest, _, rest = found.partition(".")
        assert len(bytes.fromhex(digest)) == 16 and rest in ("", "dir")


@law(15)
@given(yaml_like(jobs.TEMPLATE.read_text()))
@example(b"\xff\xfe")
@example(b"[" * 1000)
@example(b"kind: Job\nspec: {template: {spec: {containers: [{name: client}]}}}")
def test_a_template_is_filled_in_or_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    found = answer(lambda: jobs.template(str(path)), "job.yaml", kind=ConfigError)
    if found is not None:
        weak = jobs.PodClass("weak", NodePool())
        filled = jobs.job(found, KubernetesConfig(), "run", "0", weak, 0, 3, {"kind": "ConfigMap"})
        assert filled["spec"]["completions"] == 3

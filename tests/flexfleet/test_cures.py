"""What an error recommends helps: a run that `check` refuses is changed as the message says, and checked again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_engine.core.errors import FlexfleetError, SeveralErrors
from fl_engine.core.types import Params
from flexfleet.config.read import flatten, load_config
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from tests.flexfleet.test_error_texts import PARAMETER, VALUE

PRIVATE = "algorithm.aggregation={name: private, noise_multiplier: 1, clip: 1}"
SITUATIONS = [
    ("partition.clients=70",),
    ("partition.clients=200",),
    ("partition.clients=2000", "partition.rule=iid"),
    ("partition.rule=disjoint_labels", "partition.clients=300", "partition.labels_per_client=9", "partition.minimum=1"),
    ("training.objective=tests.flexfleet.test_cures:objective",),
    ("partition.alpha=1e308",),
    ("training.optimizer=torch.optim:Adam", "training.momentum=0.9"),
    ("algorithm.rule=authors", "algorithm.targets=[2, 50, 100]"),
    ("partition.rule=local", "run.backend=kubernetes"),
    ("partition.folders=.",),
    ("partition.proxy=0",),
    ("partition.proxy=0.001",),
    ("partition.proxy=0", "publish.models=true", "algorithm.name=fedavg"),
    ("partition.proxy_shared=true", "evaluate.on=clients"),
    ("rounds.buffer=3",),
    ("rounds.mode=buffered", "rounds.over_provision=1.5"),
    ("rounds.mode=buffered", "rounds.deadline_s=3"),
    ("rounds.mode=buffered", "rounds.quorum=0.5"),
    ("rounds.mode=buffered", "algorithm.name=scaffold"),
    ("algorithm.name=fjord", "model.norm=static"),
    ("algorithm.name=fedavg", PRIVATE, "model.norm=static"),
    ("algorithm.name=fedavg", PRIVATE, "algorithm.selection={name: oort}"),
    ("algorithm.name=heterofl", "fleet.tiers=[{name: weak, share: 1, memory: 1}]", "algorithm.on_too_small=fail"),
    ("algorithm.epsilon=0.0001",),
    ("run.precision=fp16", "training.optimizer=torch.optim:Adam"),
    ("run.strategy=batched", "run.precision=fp16"),
    ("publish.precision=[int8]", "publish.onnx=false"),
]


def objective(model: nn.Module, x: Tensor, y: Tensor, start: Params) -> Tensor:
    return cross_entropy(model(x), y)


def problems(sets: Sequence[str]) -> dict[tuple[str, str | None, str], str]:
    """Map each problem (code, parameter, message without numbers) to its message."""
    try:
        check(Resolved.load([], ["tracking.mlflow=null", *sets]))
    except SeveralErrors as error:
        found = list(error.errors)
    except FlexfleetError as error:
        found = [error]
    else:
        return {}
    return {(each.code, each.path, re.sub(r"[\d.,]+", "", str(each))): str(each) for each in found}


def changed(sets: Sequence[str], setting: str) -> list[str]:
    name = setting.partition("=")[0]
    return [*(each for each in sets if each.partition("=")[0] != name), setting]


def cures(text: str, sets: Sequence[str]) -> Iterator[list[str]]:
    """Yield the alternatives that a message recommends. An alternative is a list of settings to try in turn."""
    for match in re.finditer(rf"(?:[Ss]et|[Uu]se|requires|or) {VALUE}", text):
        yield [f"{match[1]}={match[2].rstrip('.')}"]
    if match := re.match(rf"{PARAMETER} must be (?:at most )?([\w.]+)", text):
        yield [f"{match[1]}={match[2]}"]
    for match in re.finditer(rf"([Ll]ower|[Dd]ecrease|[Ii]ncrease) ((?:{PARAMETER}(?:, | or )?)+)", text):
        factor = 2 if match[1].lower() == "increase" else 0.5
        for name in re.findall(PARAMETER, match[2]):
            start = flatten(load_config(None, sets))[name]
            yield [f"{name}={type(start)(start * factor**step)}" for step in range(1, 16)]


@pytest.mark.parametrize("sets", SITUATIONS, ids=" ".join)
def test_recommendation_of_an_error_removes_the_error(sets: tuple[str, ...]) -> None:
    ((problem, text),) = problems(sets).items()
    alternatives = list(cures(text, sets))
    assert alternatives, text
    for alternative in alternatives:
        assert any(problem not in problems(changed(sets, each)) for each in alternative), (alternative, text)

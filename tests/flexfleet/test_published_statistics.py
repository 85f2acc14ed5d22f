"""Batch norm that stores statistics, of levels that are scored with others (`static_bn`): exported, and in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_engine.algorithms.heterofl import HeteroFL
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params, is_statistic, take
from fl_engine.core.types import Params, PoolModel
from fl_engine.models import export
from fl_engine.models.traced import from_module
from fl_engine.storage.store import decode
from fl_engine.testing.tiny import tiny_data, tiny_pool
from fl_engine.training.evaluation import evaluate
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.publish import described
from tests.harness.settings import refused_at

PROXY = torch.arange(10, 40)


class Net(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def of_heterofl(place: int) -> tuple[Data, ModelFamily, PoolModel, Params]:
    """The data, the network, a level, and global weights whose stored statistics are no level's."""
    data = tiny_data((1, 8, 8))
    family = from_module(Net)(data.input_shape, data.task.outputs)
    params = initial_params(family, 0)
    params |= {"bn.running_mean": torch.full((8,), 50.0), "bn.running_var": torch.full((8,), 9.0)}
    return data, family, tiny_pool(HeteroFL(), family)[place], params


@pytest.mark.parametrize("place", [0, -1], ids=["smallest", "largest"])
def test_exported_level_has_the_statistics_of_the_proxy(place: int, tmp_path: Path) -> None:
    data, family, member, params = of_heterofl(place)
    before = {name: tensor.clone() for name, tensor in params.items()}
    about, _ = export.export("net", family, params, member, data, PROXY, 0.5, tmp_path)
    own = take(params, family.layout(), member.spec)
    y = nn.functional.conv2d(data.normalise(data.train_x[PROXY]), own["conv.weight"], own["conv.bias"])
    kept = decode((tmp_path / export.WEIGHTS).read_bytes(), "exported")
    torch.testing.assert_close(kept["bn.running_mean"], y.mean((0, 2, 3)))
    torch.testing.assert_close(kept["bn.running_var"], y.var((0, 2, 3)))
    assert all(torch.equal(kept[name], tensor) for name, tensor in own.items() if not is_statistic(name))
    assert kept.keys() == own.keys() and all(torch.equal(params[name], before[name]) for name in params)
    scored = evaluate(
        family, own, member.spec, data, data.test_x, data.test_y, static_bn=True, statistics_x=data.train_x[PROXY]
    )
    assert about.accuracy_exported == pytest.approx(scored.value)
    assert about.proxy_statistics and "with the proxy's statistics" in described(about)


def test_level_scored_with_stored_statistics_keeps_their_bits(tmp_path: Path) -> None:
    data, family, member, params = of_heterofl(0)
    stored = replace(member, static_bn=False)
    about, _ = export.export("net", family, params, stored, data, PROXY[:0], 0.5, tmp_path)
    kept = decode((tmp_path / export.WEIGHTS).read_bytes(), "exported")
    own = take(params, family.layout(), member.spec)
    assert kept.keys() == own.keys() and all(torch.equal(kept[name], own[name]) for name in own)
    assert about.proxy_statistics is False and "the proxy's statistics" not in described(about)


def test_without_proxy_data_it_is_refused_before_the_first_round(quick: tuple[str, ...]) -> None:
    sets = [*quick, "algorithm.name=heterofl", "model.norm=static", "partition.proxy=0", "publish.onnx=false"]
    check(Resolved.load(None, sets))
    published = [*sets, "publish.models=true"]
    with pytest.raises(ConfigError) as error:
        check(Resolved.load(None, published))
    assert error.value.path == "partition.proxy" and "algorithm.static_bn=false" in str(error.value)
    check(Resolved.load(None, [*published, "algorithm.static_bn=false"]))
    with refused_at("partition.proxy"):
        check(Resolved.load(None, [*published, "model.norm=batch"]))

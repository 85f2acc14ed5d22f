"""Quantized FedAvg: one sub-network, sent quantised; nothing else moves, and it is what is reported."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.algorithms import QuantizedFedAvg
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.costs import count_params
from fl_engine.core.slicing import take
from fl_engine.core.types import Codecs
from fl_engine.core.widths import prefix
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore, tensor_bytes
from fl_engine.testing import played
from fl_engine.testing.models import kept_mask
from fl_engine.testing.tiny import SEED, TRAINING, TinyNet, context_of, start_of, tiny_pool, tiny_site


def federated(algorithm: QuantizedFedAvg, site: Site, folder: Path, stop: int = 3) -> tuple[Any, list[Any]]:
    return played.federated(Run(algorithm, site, RoundsConfig(stop=stop, commit_every=1)), FolderStore(folder))


@pytest.mark.parametrize(("level", "width"), [("small", 0.5), ("medium", 0.75), ("large", 1.0)])
def test_the_sub_network_is_the_whole_pool(level: Any, width: float) -> None:
    family = TinyNet()
    (model,) = tiny_pool(QuantizedFedAvg(level=level, bits=9), family)
    assert (model.name, model.spec) == (level, prefix(family.layout(), width))
    assert model.dispatched and model.reported and not model.static_bn
    assert model.share == count_params(family, model.spec) / count_params(family)
    assert model.codecs == Codecs(down=Qsgd(bits=9))


def test_weights_are_quantised_on_the_way_down_only() -> None:
    algorithm = QuantizedFedAvg(training=TRAINING, level="medium", bits=8)
    site = tiny_site(algorithm)
    state, spec = start_of(algorithm, site), site.pool[0].spec
    plan = coding.sent(algorithm.plan(state, context_of(site, 0)), site.pool, Codecs(), SEED)
    plain = take(state.params, site.layout, spec)
    for order in plan.orders:
        assert order.codecs == Codecs(down=Qsgd(bits=8))
        for name, tensor in order.payload.items():
            step = math.sqrt(512) * float(plain[name].abs().max()) / 255  # at most: a bucket's norm over its levels
            assert float((tensor - plain[name]).abs().max()) <= step
            assert not torch.equal(tensor, plain[name])
        assert tensor_bytes(order.travels) < tensor_bytes(plain) * 0.32, "9 of 32 bits, and norms"
        assert coding.answered(order, spec, order.payload, site.layout) is None, "as they are"


def test_only_the_sub_network_moves_and_is_reported(tmp_path: Path) -> None:
    algorithm = QuantizedFedAvg(training=replace(TRAINING, fraction=0.5), level="small", bits=9)
    site = tiny_site(algorithm)
    final, rows = federated(algorithm, site, tmp_path, 6)
    start, spec = start_of(algorithm, site).params, site.pool[0].spec
    for name, tensor in final.params.items():
        kept = kept_mask(site.layout, spec, name, tensor.shape)
        assert torch.equal(tensor[~kept], start[name][~kept]), name
        assert not torch.equal(tensor[kept], start[name][kept]), name
    for row in rows:
        assert row.metrics["full"] == row.metrics["avg"] == row.metrics["accuracy/small"]
        assert row.metrics["bits_up"] == 32 * site.pool[0].params * row.metrics["clients_trained"]
        assert row.metrics["bits_down"] < 11 * site.pool[0].params * len(row.clients), "10 bits a number, and norms"
        assert row.metrics["seconds_encode"] > 0
    assert rows[-1].metrics["loss/small"] < rows[0].metrics["loss/small"]

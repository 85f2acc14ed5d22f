"""Data of devices: how they are read, what the server may be told of them, and which device is which client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import DataError, PartitionError
from fl_engine.core.samples import Data
from fl_engine.core.types import ClientFailure, ClientResult, Device
from fl_engine.data.local_data import Form, Unknown, assign_clients, joined, of_client, of_server
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import ResultManifest, key_of, sign
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TRAINING, assert_same_results, first_plan, tiny_site
from tests.harness.stores import MemoryStore


def data_of(samples: int, start: int = 0, **more: Any) -> Data:
    x = torch.arange(start, start + samples * 4).reshape(samples, 1, 2, 2).to(torch.uint8)
    y = torch.arange(samples) % 3
    told = {"mean": (0.1,), "std": (0.2,), "task": Classification(3), **more}
    return Data("own", told["task"], x, y, x[:1], y[:1], told["mean"], told["std"])


SERVER = data_of(10, mean=(0.5,), std=(0.25,))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (data_of(5), "holds 5 training samples, partition.most = 4"),
        (data_of(4, task=Classification(4)), "the task"),
        (replace(data_of(4), train_x=torch.zeros(4, 1, 3, 3, dtype=torch.uint8),
                 test_x=torch.zeros(1, 1, 3, 3, dtype=torch.uint8)), r"samples of the shape \(1, 3, 3\)"),
        (replace(data_of(4), train_x=torch.rand(4, 1, 2, 2) - 1, test_x=torch.rand(1, 1, 2, 2)),
         "samples of type float32"),
    ],
)  # fmt: skip
def test_other_data_than_the_runs_are_refused(own: Data, said: str) -> None:
    with pytest.raises(DataError):
        Form.of(SERVER).normalises(own, "here", 4)


def test_the_server_knows_its_proxy_and_nothing_of_clients(tmp_path: Path) -> None:
    found = of_server(SERVER, 3, 0)
    assert sorted([*found.proxy_train, *found.proxy_test]) == list(range(10)) and len(found.proxy_test) == 2
    assert [len(part) for part in found.clients] == [0, 0, 0] and not found.counts.any()
    found.save(tmp_path)
    again = Partition.load(tmp_path, SERVER)
    assert again.rule == "local" and np.array_equal(again.proxy_train, found.proxy_train)


def test_clients_that_are_simulated_hold_what_their_folders_do() -> None:
    parts = [data_of(4, 100), data_of(2, 200)]
    data, partition = joined(SERVER, of_server(SERVER, 2, 0), parts)
    for part, held, client in zip(parts, partition.clients, (0, 1), strict=True):
        alone = of_client(part, 2, client).clients
        assert torch.equal(data.train_x[held], part.train_x[alone[client]]) and not len(alone[1 - client])
        assert torch.equal(data.train_y[held], part.train_y)
    assert torch.equal(data.train_x[partition.proxy_train], SERVER.train_x[partition.proxy_train])
    assert torch.equal(data.test_x, SERVER.test_x)


ALGORITHM = FlexFL(training=TRAINING)
KNOWN = tiny_site(ALGORITHM)
SITE = replace(KNOWN, most=20)
PLAN = first_plan(ALGORITHM, KNOWN)
ASSIGNMENT = PLAN.assignments[0]


def answered(**changes: Any) -> ClientResult:
    store, key = MemoryStore(), key_of(b"secret")
    box = Mailbox(store, replace(SITE.rules, algorithm=ALGORITHM), key)
    box.put_result(PLAN, execute(ALGORITHM, ASSIGNMENT, KNOWN))
    name = f"rounds/00000/updates/{ASSIGNMENT.client}.json"
    told = ResultManifest.model_validate_json(store.files[name])
    told = told.model_copy(update={"signature": None, **changes})
    told = told.model_copy(update={"metrics": {**told.metrics, **changes.get("metrics", {})}})
    store.put(name, sign(told, key(ASSIGNMENT)).model_dump_json().encode())
    return box.receive(PLAN, ASSIGNMENT.client)


def test_a_count_is_what_the_device_says_within_bounds() -> None:
    assert SITE.rules.samples == () and KNOWN.rules.samples != ()
    assert_same_results([answered()], [execute(ALGORITHM, ASSIGNMENT, KNOWN)])
    for count in (0, -1, 21, 10**9):
        result = answered(num_examples=count)
        assert isinstance(result, ClientFailure) and result.code == "examples" and "partition.most" in result.reason


def test_a_server_that_does_not_know_says_so() -> None:
    samples = ServerSite(SITE).samples
    assert len(samples) == len(SITE.fleet) == len(list(samples)) and isinstance(samples, Unknown)
    with pytest.raises(PartitionError):
        samples[0]
    assert samples.get(0, 7) == 7
    context = Run(ALGORITHM, SITE, RoundsConfig()).context(0, 0.0)
    assert context.samples == () == context.draws


FLEET = [Device(c, tier, 100.0, 0.0) for c, tier in enumerate(["strong", "weak", "weak", "strong"])]


def test_devices_get_clients_of_their_tier_in_order_of_names() -> None:
    tiers = {"weak-10": "weak", "device-1": None, "strong-1": "strong", "weak-2": "weak"}
    assert assign_clients({}, tiers, FLEET) == {"weak-2": 1, "weak-10": 2, "strong-1": 0, "device-1": 3}
    assert assign_clients({}, {**tiers, "weak-11": "weak"}, FLEET).get("weak-11") is None


def test_device_stays_its_client_until_it_is_revoked() -> None:
    before = {"weak-10": 1, "weak-3": 2, "strong-1": 3}
    tiers = {"weak-10": "weak", "strong-1": "strong", "weak-4": "weak"}
    assert assign_clients(before, tiers, FLEET) == {"weak-10": 1, "strong-1": 3, "weak-4": 2}


@given(st.lists(st.sampled_from(["weak", "strong", None]), max_size=7), st.permutations(range(7)))
def test_each_client_has_one_device_of_its_tier(tiers: list[str | None], assignment: list[int]) -> None:
    tier_of = {f"d-{i}": tier for i, tier in enumerate(tiers)}
    found = assign_clients({}, tier_of, FLEET)
    assert len(set(found.values())) == len(found) <= len(FLEET)
    assert all(tier_of[name] in (None, FLEET[client].tier) for name, client in found.items())
    shuffled = {f"d-{i}": tiers[i] for i in assignment if i < len(tiers)}
    assert assign_clients({}, shuffled, FLEET) == found, "in any order"
    assert assign_clients(found, tier_of, FLEET) == found

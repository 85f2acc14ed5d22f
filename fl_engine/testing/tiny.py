"""A minimal network, data set, fleet and clients, for tests of federated runs in milliseconds.

The network contains layers that are difficult to slice: a flatten layer that repeats channels, a residual connection, a
block that can be dropped, and optional dropout. The network has no batch norm, so outputs do not depend on the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from fl_engine.algorithms.training import Training
from fl_engine.core import seeds
from fl_engine.core.clients import ENCODING, LEASE_S
from fl_engine.core.contracts import Algorithm, ChoosesNetwork, ModelFamily, Tracker
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import index_of, initial_params
from fl_engine.core.types import (
    HEAD,
    Assignment,
    Axis,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Device,
    Params,
    Pool,
    RoundContext,
    RoundPlan,
    SubmodelSpec,
)
from fl_engine.data.partition import Partition
from fl_engine.data.partitioning import labels_of
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.models.layers import LayerMaker, Residual
from fl_engine.models.network import ExitNetwork
from fl_engine.preparation import assumed
from fl_engine.preparation.apoz import ApozLayer, ApozScores
from fl_engine.rounds.server import ServerSite
from fl_engine.selection.capacity import dispatched
from fl_engine.tasks import Classification

CHW = (1, 4, 4)
CLASSES = 4
CLIENTS = 20
SAMPLES = 8
"""Number of training samples per client."""
SEED = 3

TRAINING = Training(fraction=0.25, epochs=2, batch_size=4, lr=0.05)


# ------------------------------------------------------------------------------------------------- network
@dataclass(frozen=True)
class TinyNet(ExitNetwork):
    """Network with 2,324 parameters for 1x4x4 images: convolution, max pool, flatten, hidden, residual, classifier.

    Groups: conv, hidden, classes. Blocks: conv, fc, extra, classifier. The block `extra` can be dropped. Early exits
    may follow conv and fc.
    """

    input_shape: tuple[int, ...] = CHW
    outputs: int = CLASSES
    dropout: float = 0.0
    """Dropout probability before the classifier."""
    conv: int = 8
    hidden: int = 32

    min_hw: ClassVar[int] = 4

    def groups(self) -> dict[str, int]:
        return {"conv": self.conv, "hidden": self.hidden}

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        _, h, w = self.input_shape
        conv, hidden = Axis("conv"), Axis("hidden")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        first = make.conv(self.input_shape[0], conv, 3)
        layers["conv"] = nn.Sequential(OrderedDict(conv=first, relu=nn.ReLU()))
        layers["pool"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        layers["fc"] = make.dense(replace(conv, repeat=(h // 2) * (w // 2)), hidden)
        if make.has_block("extra"):
            layers["extra"] = Residual(OrderedDict(linear=make.linear(hidden, hidden), relu=nn.ReLU()))
        if self.dropout > 0:
            layers["dropout"] = nn.Dropout(self.dropout)
        layers["classifier"] = make.linear(hidden, Axis(HEAD))
        return layers

    def skippable(self) -> tuple[str, ...]:
        return ("extra",)

    def exit_points(self) -> tuple[str, ...]:
        return ("conv", "fc")

    def exit_axis(self, block: str) -> Axis:
        return Axis("conv" if block == "conv" else "hidden")

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        return {"conv": ("conv.",), "hidden": ("fc.", "extra.")}


# ---------------------------------------------------------------------------------------------------- data
def tiny_data(chw: tuple[int, int, int] = CHW, classes: int = CLASSES, clients: int = CLIENTS) -> Data:
    """Return noisy images with one pattern per class: `SAMPLES` training images per client and 40 test images."""
    rng = seeds.rng(0, "tiny data")
    patterns = rng.integers(40, 216, (classes, *chw))

    def images(count: int) -> tuple[Tensor, Tensor]:
        y = rng.permutation(np.arange(count) % classes)
        x = np.clip(patterns[y] + rng.integers(-40, 41, (count, *chw)), 0, 255)
        return torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y.astype(np.int64))

    train_x, train_y = images(SAMPLES * clients)
    test_x, test_y = images(40)
    channels = chw[0]
    return Data(
        "tiny", Classification(classes), train_x, train_y, test_x, test_y, (0.5,) * channels, (0.25,) * channels
    )


def tiny_partition(data: Data, sizes: Sequence[int]) -> Partition:
    """Assign the first `sizes[0]` samples to client 0, the next `sizes[1]` samples to client 1, and so on."""
    ends = np.cumsum(sizes)
    parts = tuple(np.arange(end - size, end, dtype=np.int64) for size, end in zip(sizes, ends, strict=True))
    labels, kinds = labels_of(data), max(1, data.task.label_count)
    counts = np.stack([np.bincount(labels[p], minlength=kinds) for p in parts], axis=1)
    nobody = np.zeros(0, dtype=np.int64)
    return Partition(nobody, nobody, parts, "by hand", {}, data.name, counts.astype(np.int64))


# --------------------------------------------------------------------------------------------------- fleet
def tiny_fleet(
    clients: int = CLIENTS,
    sigma: tuple[float, ...] = (5.0, 8.0, 10.0),
    family: ModelFamily | None = None,
    smallest: int = 0,
) -> tuple[Device, ...]:
    """Return devices as in FlexFL's Table I. If `family` is set, a model with `smallest` parameters fits into every
    device."""
    tiers = [Tier("weak", 0.4, 35.0, sigma), Tier("medium", 0.3, 60.0, sigma), Tier("strong", 0.3, 110.0, sigma)]
    if family is not None:
        tiers = [devices.at_least(tier, smallest, family) for tier in tiers]
    return devices.fleet(tiers, clients, SEED)


def network_of(algorithm: Algorithm, family: ModelFamily) -> ModelFamily:
    """Return the network that the algorithm trains instead of `family`."""
    return algorithm.network(family) if isinstance(algorithm, ChoosesNetwork) else family


def tiny_pool(algorithm: Algorithm, family: ModelFamily, apoz: Sequence[float] | None = None) -> Pool:
    """Return the algorithm's pool. Results of preparations are placeholders, except for the optional scores `apoz`."""

    def nothing() -> NoReturn:
        raise ConfigError("the algorithm's `pool` must not use server data, because `tiny_pool` has none")

    prepared = assumed(algorithm, family)
    if apoz is not None:
        layers = tuple(ApozLayer(group=f"layer {i}", size=2, apoz=a, adjustment=1.0) for i, a in enumerate(apoz))
        prepared = {**prepared, "apoz": ApozScores(layers=layers)}
    return algorithm.pool(family, prepared, ServerSite(nothing))


def tiny_site(
    algorithm: Algorithm,
    family: ModelFamily | None = None,
    *,
    sizes: Sequence[int] | None = None,
    fleet: tuple[Device, ...] | None = None,
    data: Data | None = None,
) -> Site:
    """Return a site with one client per device. Client c has `sizes[c]` samples. By default, samples are images."""
    family = network_of(algorithm, TinyNet() if family is None else family)
    pool = tiny_pool(algorithm, family)
    if fleet is None:
        is_capable = getattr(algorithm, "eligible", "all") == "capable"
        fleet = tiny_fleet() if is_capable else tiny_fleet(family=family, smallest=pool[dispatched(pool)[0]].params)
    if data is None:
        c, h, w = family.input_shape
        data = tiny_data((c, h, w), family.outputs, len(fleet))
    partition = tiny_partition(data, (SAMPLES,) * len(fleet) if sizes is None else sizes)
    return Site(family, pool, fleet, data, partition, SEED)


# ----------------------------------------------------------------------------------------- made-up results
def start_of(algorithm: Algorithm, site: Site, params: Params | None = None) -> Any:
    """Return the algorithm's state before the first round."""
    params = initial_params(site.family, SEED) if params is None else params
    return algorithm.init(params, site.family.layout(), site.fleet, site.pool, ServerSite(site))


def context_of(site: Site, round: int, seed: int = SEED, **more: Any) -> RoundContext:
    """Return the context of a round in which each client trains for one epoch."""
    samples = tuple(len(indices) for indices in site.partition.clients)
    known = {"samples": samples, "draws": samples, **more}
    return RoundContext(round, seed, site.fleet, site.fleet, site.pool, **known)


def first_plan(algorithm: Algorithm, site: Site) -> RoundPlan:
    """Return the plan of the first round."""
    return algorithm.plan(start_of(algorithm, site), context_of(site, 0))


def with_level(update: ClientUpdate, site: Site) -> ClientUpdate:
    """Return the update with the level that the server of a run would set."""
    return replace(update, level=index_of(site.pool, site.layout, update.spec))


def update_of(assignment: Assignment, spec: SubmodelSpec, payload: Params, examples: int = 5) -> ClientUpdate:
    return ClientUpdate(assignment.round, assignment.client, spec, payload, examples, {"loss": 1.0, "steps": 1.0})


def failure_of(assignment: Assignment) -> ClientFailure:
    return ClientFailure(assignment.round, assignment.client, "train", "made up")


def assert_same_assignments(left: RoundPlan, right: RoundPlan) -> None:
    """Assert that two plans are identical. Payloads and memory are compared bit for bit."""
    assert (left.round, len(left.assignments)) == (right.round, len(right.assignments))
    for a, b in zip(left.assignments, right.assignments, strict=True):
        assert (a.round, a.client, a.spec, a.seed, a.level) == (b.round, b.client, b.spec, b.seed, b.level)
        assert dict(a.hints) == dict(b.hints)
        assert_same_bits(a.payload, b.payload)
        assert_same_bits(a.memory, b.memory)


def assert_same_results(left: Sequence[ClientResult], right: Sequence[ClientResult]) -> None:
    """Assert that two lists of results are identical, except for measured times. Payloads are compared bit for bit."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, ClientFailure) or isinstance(b, ClientFailure):
            assert a == b
            continue
        assert (a.round, a.client, a.spec, a.num_examples) == (b.round, b.client, b.spec, b.num_examples)
        assert measured_alike(a.metrics) == measured_alike(b.metrics)
        assert_same_bits(a.payload, b.payload)
        assert_same_bits(a.state, b.state)


def measured_alike(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client metrics that are the same in repeated runs, because they do not depend on measured times."""
    return {name: value for name, value in values.items() if name not in ("seconds", LEASE_S, *ENCODING)}


def assert_same_bits(left: Params, right: Params) -> None:
    """Assert that two dicts of tensors have the same names, shapes, types and bits. The order of names may differ."""
    assert left.keys() == right.keys()
    for name in left:
        a, b = left[name].cpu(), right[name].cpu()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        # Compare bytes, because 0.0 == -0.0 and NaN != NaN.
        assert a.numpy().tobytes() == b.numpy().tobytes(), name


class Memory(Tracker):
    """A tracker that stores the metrics in memory."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self.rows.update({step: dict(values) for step, values in rows})

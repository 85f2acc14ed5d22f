"""The smallest things that a federated run needs - network, data, fleet, clients - for tests that take milliseconds.

Small, but with all that slicing has to get right: channels that own several entries after a flatten, a residual
tie, a block that can be dropped, dropout where asked for. No batch norm, so a sample does not depend on its batch.
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
from fl_engine.core.clients import ENCODING
from fl_engine.core.contracts import Algorithm, ChoosesNetwork, ModelFamily, Selector
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import index_of, initial_params
from fl_engine.core.types import (
    FULL,
    HEAD,
    Axis,
    ClientFailure,
    ClientUpdate,
    Device,
    Outcome,
    ParamLayout,
    Params,
    Pick,
    Pool,
    PoolModel,
    Prunable,
    RoundContext,
    RoundPlan,
    Slot,
    SubmodelSpec,
    Tables,
    WorkOrder,
)
from fl_engine.data.partition import Partition, labels_of
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.models.exits import assemble, check_exits, check_spec, slots_with_exits
from fl_engine.models.layers import FREE, linear_slots
from fl_engine.preparation import assumed
from fl_engine.preparation.apoz import ApozLayer, ApozScores
from fl_engine.rounds.server import LazyServer, ServerSite
from fl_engine.selection.capacity import dispatched
from fl_engine.tasks import Classification

CHW = (1, 4, 4)
CLASSES = 4
CLIENTS = 20
SAMPLES = 8
"""Of each client."""
SEED = 3

TRAINING = Training(fraction=0.25, epochs=2, batch_size=4, lr=0.05)


# ------------------------------------------------------------------------------------------------- network
class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.relu = nn.ReLU()

    def forward(self, x_bh: Tensor) -> Tensor:
        out: Tensor = x_bh + self.relu(self.linear(x_bh))
        return out


@dataclass(frozen=True)
class TinyNet:
    """Convolution, 2x2 max pool, flatten, hidden layer, residual layer, classifier: 2,324 parameters at 1x4x4.

    Groups: conv, hidden, classes. Blocks: conv, fc, extra, classifier; `extra` can be dropped. An early
    exit may sit behind conv and fc.
    """

    input_shape: tuple[int, int, int] = CHW
    outputs: int = CLASSES
    dropout: float = 0.0
    """Before the classifier, 0 for none."""
    conv: int = 8
    hidden: int = 32
    exits: tuple[str, ...] = ()
    """Blocks behind which an early exit sits: some of `exit_points`, in that order."""

    min_hw: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_exits(type(self).__name__, self.exits, self.exit_points())

    def layout(self) -> ParamLayout:
        conv, hidden = Axis("conv"), Axis("hidden")
        slots = {
            "conv.conv.weight": Slot("conv", (conv, FREE, FREE, FREE)),
            "conv.conv.bias": Slot("conv", (conv,)),
        }
        slots |= linear_slots("fc.linear", "fc", Axis("conv", self._last_map()), hidden)
        slots |= linear_slots("extra.linear", "extra", hidden, hidden)
        slots |= linear_slots("classifier", "classifier", hidden, Axis(HEAD))
        groups = {"conv": self.conv, "hidden": self.hidden, HEAD: self.outputs}
        return ParamLayout(groups, slots_with_exits(slots, self.exits))

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, C, H, W) -> logits (B, kept classes); with exits, a tuple of such, one per output kept."""
        layout = self.layout()
        check_spec(layout, spec, skippable=("extra",), exits=self.exits)
        conv, hidden, classes = (layout.width(spec, group) for group in layout.groups)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        first = nn.Conv2d(self.input_shape[0], conv, 3, padding=1)
        layers["conv"] = nn.Sequential(OrderedDict(conv=first, relu=nn.ReLU()))
        layers["pool"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        linear = nn.Linear(conv * self._last_map(), hidden)
        layers["fc"] = nn.Sequential(OrderedDict(linear=linear, relu=nn.ReLU()))
        if layout.has_block(spec, "extra"):
            layers["extra"] = _Residual(hidden)
        if self.dropout > 0:
            layers["dropout"] = nn.Dropout(self.dropout)
        layers["classifier"] = nn.Linear(hidden, classes)
        return assemble(layers, layout, spec, self.exits)

    def exit_points(self) -> tuple[str, ...]:
        """The blocks behind which an early exit may sit, in network order."""
        return ("conv", "fc")

    def prunable(self) -> tuple[Prunable, ...]:
        return (
            Prunable("conv", ("conv.",), ("conv.relu",)),
            Prunable("hidden", ("fc.", "extra."), ("fc.relu", "extra.relu")),
        )

    def _last_map(self) -> int:
        """Pixels of one channel where the flatten is."""
        _, h, w = self.input_shape
        return (h // 2) * (w // 2)


# ---------------------------------------------------------------------------------------------------- data
def tiny_data(chw: tuple[int, int, int] = CHW, classes: int = CLASSES, clients: int = CLIENTS) -> Data:
    """One noisy pattern per class, easy to learn: `SAMPLES` training images for each client, 40 test images."""
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
    """The first `sizes[0]` samples to client 0, the next `sizes[1]` to client 1, and so on; no proxy."""
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
    """FlexFL's Table I. With `family`, every device can hold a model of `smallest` parameters, as in the default
    fleet."""
    tiers = [Tier("weak", 0.4, 35.0, sigma), Tier("medium", 0.3, 60.0, sigma), Tier("strong", 0.3, 110.0, sigma)]
    if family is not None:
        tiers = [devices.at_least(tier, smallest, family) for tier in tiers]
    return devices.fleet(tiers, clients, SEED)


def tiny_pool(algorithm: Algorithm, family: ModelFamily, apoz: Sequence[float] | None = None) -> Pool:
    """The algorithm's pool, where nothing was prepared but `apoz`, if given, and the server holds nothing yet."""

    def nothing() -> NoReturn:
        raise ConfigError("a tiny pool is made before there are data")

    prepared = assumed(algorithm, family)
    if apoz is not None:
        layers = tuple(ApozLayer(group=f"layer {i}", size=2, apoz=a, adjustment=1.0) for i, a in enumerate(apoz))
        prepared = {**prepared, "apoz": ApozScores(layers=layers)}
    return algorithm.pool(family, prepared, LazyServer(nothing))


def paper_pool(shares: Sequence[float] = (0.25, 0.4, 0.5, 0.9, 1.0)) -> tuple[ParamLayout, Pool]:
    """FlexFL's five models at exact sizes: of 100 channels with one parameter each."""
    layout = ParamLayout({"g": 100}, {"w": Slot("b", (Axis("g"),))})
    pool = tuple(
        PoolModel(
            name=name,
            spec=SubmodelSpec.of({"g": round(100 * share)}) if share < 1 else FULL,
            params=round(100 * share),
            share=share,
            macs=round(100 * share),
            dispatched="'" not in name,
            reported="'" not in name,
        )
        for name, share in zip(("M1", "M2'", "M2", "M3'", "M3"), shares, strict=True)
    )
    return layout, pool


def tiny_site(
    algorithm: Algorithm,
    family: ModelFamily | None = None,
    *,
    sizes: Sequence[int] | None = None,
    fleet: tuple[Device, ...] | None = None,
    data: Data | None = None,
) -> Site:
    """Clients with data, for `algorithm`: as many as the fleet has devices, `sizes[c]` samples at client c. Without
    `data` they hold images."""
    family = TinyNet() if family is None else family
    if isinstance(algorithm, ChoosesNetwork):
        family = algorithm.network(family)
    pool = tiny_pool(algorithm, family)
    if fleet is None:
        is_capable = getattr(algorithm, "eligible", "all") == "capable"
        fleet = tiny_fleet() if is_capable else tiny_fleet(family=family, smallest=pool[dispatched(pool)[0]].params)
    if data is None:
        c, h, w = family.input_shape
        data = tiny_data((c, h, w), family.outputs, len(fleet))
    partition = tiny_partition(data, (SAMPLES,) * len(fleet) if sizes is None else sizes)
    return Site(family, pool, fleet, data, partition, SEED)


def on_devices_alone(algorithm: Any) -> Any:
    """The algorithm without its server's fine-tuning, where it has such: a tiny site leaves the server no data."""
    return replace(algorithm, fine_tuning=None) if hasattr(algorithm, "fine_tuning") else algorithm


# ----------------------------------------------------------------------------------------- made-up outcomes
def start_of(algorithm: Algorithm, site: Site, params: Params | None = None) -> Any:
    """The algorithm's state before the first round."""
    params = initial_params(site.family, SEED) if params is None else params
    return algorithm.init(params, site.family.layout(), site.fleet, site.pool, ServerSite(site))


def context_of(site: Site, round: int, seed: int = SEED, **more: Any) -> RoundContext:
    """What a round of these clients is planned from. Each trains an epoch of its samples."""
    samples = tuple(len(indices) for indices in site.partition.clients)
    known = {"samples": samples, "draws": samples, **more}
    return RoundContext(round, seed, site.fleet, site.fleet, site.pool, **known)


def picked(selector: Selector, tables: Tables, fleet: Sequence[Device], pool: Pool, rng: Any, count: int) -> list[Pick]:
    """Whom it picks of a fleet that is all available."""
    return selector.pick(tables, RoundContext(0, SEED, tuple(fleet), tuple(fleet), pool), count, rng)


def learned(selector: Selector, tables: Tables, sent: int, back: int, client: int) -> Tables:
    """What it remembers after a client was sent pool model `sent` and trained pool model `back`."""
    update = ClientUpdate(0, client, FULL, {}, 1, {}, level=back)
    return selector.learn(tables, WorkOrder(0, client, FULL, {}, 0, sent), update, 0.0)


def brought(update: ClientUpdate, site: Site) -> ClientUpdate:
    """With what the server knows of it: the pool model that was trained."""
    return replace(update, level=index_of(site.pool, site.layout, update.spec))


def update_of(order: WorkOrder, spec: SubmodelSpec, payload: Params, examples: int = 5) -> ClientUpdate:
    return ClientUpdate(order.round, order.client, spec, payload, examples, {"loss": 1.0, "steps": 1.0})


def failure_of(order: WorkOrder) -> ClientFailure:
    return ClientFailure(order.round, order.client, "train", "made up")


def assert_same_orders(left: RoundPlan, right: RoundPlan) -> None:
    """Equal in everything, payloads bit for bit."""
    assert (left.round, len(left.orders)) == (right.round, len(right.orders))
    for a, b in zip(left.orders, right.orders, strict=True):
        assert (a.round, a.client, a.spec, a.seed, a.level) == (b.round, b.client, b.spec, b.seed, b.level)
        assert dict(a.hints) == dict(b.hints)
        assert_same_bits(a.payload, b.payload)


def assert_same_outcomes(left: Sequence[Outcome], right: Sequence[Outcome]) -> None:
    """Equal in everything but the time it took, payloads bit for bit."""
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
    """The figures of a client, or a client's line, that are the same again when a run is repeated."""
    return {name: value for name, value in values.items() if name not in ("seconds", *ENCODING)}


def assert_same_bits(left: Params, right: Params) -> None:
    """Names (in whatever order: storage sorts them), shapes, types and bits."""
    assert left.keys() == right.keys()
    for name in left:
        a, b = left[name].cpu(), right[name].cpu()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        # Compared as bytes: 0.0 and -0.0 are different bits, and a NaN is equal to itself.
        assert a.numpy().tobytes() == b.numpy().tobytes(), name


class Memory:
    """Keeps everything, for tests and notebooks."""

    def __init__(self) -> None:
        self.logged_params: dict[str, Any] = {}
        self.rows: dict[int, dict[str, float]] = {}
        self.status: str | None = None

    def params(self, values: Mapping[str, Any]) -> None:
        self.logged_params.update(values)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self.rows.update({step: dict(values) for step, values in rows})

    def finish(self, status: str) -> None:
        self.status = status

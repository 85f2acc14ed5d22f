"""Compare the algorithms on real data.

`CAMPAIGNS` lists the comparisons, which `flexfleet compare` runs.

All main algorithms run on CIFAR-10, Fashion-MNIST, WISDM and AEP, with IID, Dirichlet and natural partitions. Each
ablation of FlexFL omits one of its components. HeteroFL runs with and without the scaler, label masks and static batch
norm. ScaleFL runs with and without distillation. Other comparisons test FjORD, Federated Dropout, DepthFL and FedSGD.
FlexFL and HeteroFL run with VGG16, MobileNetV2 and ResNet34 (as in FlexFL's Table II). FlexFL and HeteroFL also run
with VGG16 on Tiny-ImageNet. With VGG16, FlexFL runs with other APoZ values, with all channels (requires a GPU), and
with few bits per weight. FedAvg, personalised methods and methods against client drift run on Fashion-MNIST with
strongly skewed labels, and FedBN on clients whose images differ in style. The effect of wrong labels is tested on
Fashion-MNIST and WISDM. Multi-branch networks with Oort's client selection are tested on Fashion-MNIST. FedX and
related algorithms run on CIFAR-10, and their times are measured on Tiny-ImageNet. A Transformer and an LSTM predict the
next characters in the lines of Shakespeare's roles. AdaptiveFL's selections and sizes are compared with a narrow VGG16.
FedRolex and HeteroFL run at high heterogeneity, with a learning rate that was chosen with a separate seed, and with
capacities that change in every round. FedRolex and Federated Dropout train a network that is larger than any client's.
AEP runs at FedAIoT's scale, with two partitions, with FedOPT at the published server learning rate, and with central
training by Adam.

FedRolex and AEP have a separate comparison for each seed. On two cores all comparisons take about twenty hours, and
AEP at full scale takes three more hours for each of three seeds.

The script writes the commands and results of all comparisons to docs/evidence/results.json, and a chart of each
comparison to the same folder. The tables of all comparisons are in runs/evidence/tables.md.

Usage:
    `make evidence`: Run all comparisons. The command resumes after an interruption and keeps finished runs.
    `python -m benchmarks.evidence wisdm_watch-natural aep-dirichlet`: Run only these two comparisons.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.pools import APOZ
from flexfleet.experiments.comparison_report import CLIENTS_FILE

STORE = Path("runs/evidence")
OUT = Path("docs/evidence")

COMMON = (
    "dataset.train_samples=10000",
    "partition.clients=20",
    "partition.proxy=0.02",
    "model.name=small_cnn",
    "training.fraction=0.2",
    "training.epochs=1",
    "training.batch_size=20",
    "training.lr=0.05",
    "training.lr_decay=0.99",
    "rounds.evaluate_every=10",
    "tracking.mlflow=null",
)
TABLE = "algorithm.selection={name: resource_table}"
WIDTHS = "algorithm.widths=[0.71,0.71,1.0]"
MAIN: dict[str, tuple[str, ...]] = {
    "flexfl": ("algorithm.epsilon=3.0",),
    "adaptivefl": (),
    # In FlexFL's paper, all algorithms use FlexFL's selection. HeteroFL runs without the scaler, masked labels and
    # static batch norm, and ScaleFL without distillation. FedRolex differs from HeteroFL only in the rolling windows.
    "heterofl": (TABLE, "algorithm.scaler=false", "algorithm.mask_labels=false", "algorithm.static_bn=false"),
    "scalefl": (TABLE, WIDTHS, "algorithm.kd_weight=0.0"),
    "decoupled": (),
    "fedrolex": (TABLE, "algorithm.static_bn=false", "algorithm.scaler=false", "algorithm.weighting=examples"),
    "all_large": ("algorithm.eligible=all",),
    "capable=all_large": ("algorithm.eligible=capable",),
}
"""Map each row of a comparison (`algorithm` or `label=algorithm`) to its settings."""
ADDITIONS: dict[str, tuple[str, ...]] = {
    "heterofl": MAIN["heterofl"],
    "heterofl_published=heterofl": (TABLE,),
    "scalefl": MAIN["scalefl"],
    "scalefl_kd=scalefl": (TABLE, WIDTHS, "algorithm.kd_weight=0.05"),
}
"""HeteroFL with and without scaler, label masks and static batch norm, and ScaleFL with and without distillation."""
OTHERS: dict[str, tuple[str, ...]] = {
    "heterofl": MAIN["heterofl"],
    "fjord": (TABLE, "algorithm.widths=[0.5,0.71,1.0]"),
    "federated_dropout": MAIN["fedrolex"],
    "depthfl": (TABLE,),
    "fedavg": (),
    "fedsgd": (),
}
"""Algorithms whose papers do not compare them with each other.

FjORD, Federated Dropout and DepthFL select clients like HeteroFL. FedSGD is compared with FedAvg."""
PERSONAL: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "fedper": (),
    "fedbn": (),
    "ditto": (),
    "fednova": (),
    "scaffold": (),
    "qffl": (),
}
"""FedAvg, and methods for non-IID clients that train the full model."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "flexfl": MAIN["flexfl"],
    "no_kd=flexfl": ("algorithm.epsilon=3.0", "algorithm.kd_weight=0.0"),
    "no_adaptive=flexfl": ("algorithm.epsilon=3.0", "algorithm.adaptive_size=null"),
    "no_apoz=flexfl": ("algorithm.epsilon=3.0", "algorithm.use_apoz=false"),
    "no_adjustment=flexfl": ("algorithm.epsilon=3.0", "algorithm.use_adjustment=false"),
}

SENSORS = (
    "training.epochs=1",
    "training.batch_size=32",
    "training.lr=0.1",
    "training.lr_decay=1.0",
    "rounds.evaluate_every=10",
    "tracking.mlflow=null",
)
WISDM = ("model.name=wisdm_lstm", "partition.proxy=0.1", "partition.minimum=10", *SENSORS)
TWO_DEVICES = (("weak", 35.0), ("strong", 110.0))
SUBJECTS = (
    "partition.rule=natural",
    "partition.clients=2",
    "training.fraction=1.0",
    f"fleet.tiers=[{', '.join(f'{{name: {name}, share: 0.5, memory: {memory}}}' for name, memory in TWO_DEVICES)}]",
)
"""Two devices: one can train a third of the network, and the other can train the full network. The seed determines
which subjects belong to which device."""
AEP = ("model.name=aep_mlp", "partition.clients=80", "training.fraction=0.1", "partition.proxy=0.05", *SENSORS)
ON_SENSORS: dict[str, tuple[str, ...]] = {name: MAIN[name] for name in ("flexfl", "heterofl", "all_large")}
ON_SENSORS["flexfl"] = ()
WRONG = ("algorithm.eligible=all", "noise.epochs=5")
NOISY: dict[str, tuple[str, ...]] = {
    "right=all_large": ("algorithm.eligible=all",),
    "wrong10=all_large": (*WRONG, "noise.labels=0.1", "noise.sure=1.0"),
    "wrong30=all_large": (*WRONG, "noise.labels=0.3", "noise.sure=1.0"),
    "wrong30_sure95=all_large": (*WRONG, "noise.labels=0.3"),
}
"""FedAvg with 0, 10 and 30 % wrong labels (FedAIoT, Table 2.5).

Labels are changed in every class in which the central model makes errors. `wrong30_sure95` follows FedAIoT's code,
which does not change the labels of a class if the model recognises at least 95 % of its samples."""

BRANCHED = (
    "dataset.train_samples=20000",
    "dataset.test_samples=2000",
    "partition.clients=200",
    "partition.proxy=0",
    "model.name=resnet18",
    "model.width=0.125",
    "fleet.tiers=[{name: device, share: 1.0, memory: 200.0}]",
    "fleet.trace={name: lognormal, speed: 0.1, bandwidth: 0.3, speed_bandwidth: 0.5}",
    "training.fraction=0.05",
    "training.epochs=1",
    "training.batch_size=20",
    "training.lr=0.05",
    "training.lr_decay=0.99",
    "rounds.evaluate_every=5",
    "tracking.mlflow=null",
)
"""As in the paper on multi-branch networks, devices have enough memory, but differ in speed, bandwidth and uptime."""
ALL, YOGI = "algorithm.eligible=all", "algorithm.server={name: yogi}"
OORT = "algorithm.selection={name: oort, share_limit: null}"  # as in the published code
FULL_AND_BRANCHES: dict[str, tuple[str, ...]] = {
    "full=all_large": (ALL,),
    "full_oort=all_large": (ALL, OORT),
    "mb=multibranch": (),
    "mb_oort=multibranch": (OORT,),
}
WITH_OTHERS: dict[str, tuple[str, ...]] = {
    "full_prox=fedprox": (ALL,),
    "full_oort_prox=fedprox": (ALL, OORT),
    "mb_prox=multibranch": ("algorithm.proximal=0.01",),
    "mb_oort_prox=multibranch": ("algorithm.proximal=0.01", OORT),
    "full_yogi=all_large": (ALL, YOGI),
    "full_oort_yogi=all_large": (ALL, OORT, YOGI),
    "mb_yogi=multibranch": (YOGI,),
    "mb_oort_yogi=multibranch": (OORT, YOGI),
    "full_buffered=all_large": (ALL, "rounds.mode=buffered", "rounds.buffer=5"),
}

TEXT = (
    "dataset.test_samples=500",
    "partition.rule=natural",
    "partition.clients=290",
    "partition.minimum=1",
    "partition.proxy=0.02",
    "pretrain.epochs=20",
    "training.fraction=0.05",
    "training.epochs=1",
    "training.batch_size=10",
    "training.drop_last=false",
    "training.lr_decay=1.0",
    "training.clip_norm=1.0",
    "rounds.norm_bound=null",
    "rounds.evaluate_every=20",
    "tracking.mlflow=null",
)
"""Only 290 of the 299 roles become clients, because the proxy data may take all lines of a role.

Half of the roles have fewer than 800 characters, but Gloucester has 30,000. Therefore the norms of updates differ by
more than `rounds.norm_bound` allows, and the bound is switched off."""
TRANSFORMER = ("model.name=text_transformer", "model.hidden=512", "training.lr=0.1")
LSTM = ("model.name=text_lstm", "training.lr=1.5")
ON_TEXT: dict[str, tuple[str, ...]] = {
    "flexfl": (),
    "heterofl": MAIN["heterofl"],
    "fedrolex": (TABLE, "algorithm.static_bn=false"),
}
WITH_LSTM: dict[str, tuple[str, ...]] = {**ON_TEXT, "flexfl": ("algorithm.use_apoz=false",), "adaptivefl": ()}
"""FlexFL does not measure APoZ here, because an LSTM does not contain a ReLU."""

OWNED = (
    "dataset.train_samples=10000",
    "partition.clients=20",
    "partition.server_classes=[8, 9]",
    "model.name=small_cnn",
    "fleet.tiers=[{name: weak, share: 0.5, memory: 35.0}, {name: medium, share: 0.5, memory: 70.0}]",
    "pretrain.epochs=10",
    "training.fraction=0.4",
    "training.epochs=1",
    "training.batch_size=32",
    "training.lr=0.05",
    "training.lr_decay=0.99",
    "rounds.evaluate_every=10",
    "tracking.mlflow=null",
)
"""The server has all samples of two classes, and the clients have all samples of the other classes.

Half of the devices have the small sub-network, and the others have the medium sub-network (FedX, section IV-E)."""


def _without(settings: tuple[str, ...], *begins: str) -> tuple[str, ...]:
    return tuple(setting for setting in settings if not setting.startswith(begins))


def _tiers(bits: int | None) -> str:
    value = "null" if bits is None else bits
    return f"algorithm.assigned={{weak: {{level: small, bits: {value}}}, medium: {{level: medium, bits: {value}}}}}"


TUNED = "algorithm.fine_tuning.gamma=0.0"
QUANTISED: dict[str, tuple[str, ...]] = {
    "fedavg=fedx": (_tiers(None), TUNED),
    "dadaquant": ("algorithm.fine_tuning={gamma: 0}",),
}
"""The comparison in section IV-D of FedX. FedX, FedX without the regulariser, FedX without fine-tuning, AdaGQ and
quantized FedAvg each run with every number of bits. The run `fedavg` trains FedX's sub-networks in float32. DAdaQuant
itself chooses the number of bits. Quantized FedAvg trains one sub-network, and its server does not have data. FedX and
`fedavg` start with weights that the server has trained on its classes. All other runs start with random weights."""
for _bits in (8, 9, 10, 11):
    QUANTISED |= {
        f"fedx_{_bits}=fedx": (_tiers(_bits),),
        f"gamma0_{_bits}=fedx": (_tiers(_bits), TUNED),
        f"untuned_{_bits}=fedx": (_tiers(_bits), "algorithm.fine_tuning=null"),
        f"adagq_{_bits}=adagq": (f"algorithm.bits={_bits}", "algorithm.fine_tuning={gamma: 0}"),
    }
    for _level in ("small", "medium", "large"):
        own = (f"algorithm.level={_level}", f"algorithm.bits={_bits}", ALL)
        QUANTISED[f"{_level}_{_bits}=quantized_fedavg"] = own

STRONG = "fleet.tiers=[{name: strong, share: 1.0, memory: 110.0}]"
SIZES: dict[str, tuple[str, ...]] = {
    "fedavg=fedx": ("algorithm.assigned={strong: {level: large, bits: null}}", TUNED),
    **{f"fedx_{level}": () for level in ("small", "medium", "large")},
}
"""In each run, all devices train the same sub-network, quantized to the number of bits that the search finds (FedX,
Figure 4), or all devices train the full network in float32."""
_UNEVEN = "algorithm.assigned={weak: {level: small, bits: 11}, medium: {level: medium, bits: 9}}"


def _medium(percent: int) -> str:
    shares = (("weak", 35.0, 1 - percent / 100), ("medium", 70.0, percent / 100))
    tiers = [f"{{name: {tier}, share: {share}, memory: {memory}}}" for tier, memory, share in shares if share]
    return f"fleet.tiers=[{', '.join(tiers)}]"


SHARES: dict[str, tuple[str, ...]] = {f"medium{p}=fedx": (_UNEVEN, _medium(p)) for p in (0, 25, 50, 75, 100)}
"""In each run, a different fraction of the devices trains the medium sub-network with 9 bits. The other devices train
the small sub-network with 11 bits (FedX, Fig. 5)."""
TIMED = (
    "partition.clients=4",
    "partition.proxy=0.1",
    "model.name=mobilenetv3_ofa",
    "fleet.tiers=[{name: weak, share: 0.5, memory: 45.0}, {name: medium, share: 0.5, memory: 70.0}]",
    "pretrain.epochs=1",
    "training.fraction=1.0",
    "training.epochs=1",
    "training.batch_size=32",
    "training.lr=0.01",
    "rounds.evaluate_every=20",
    "tracking.mlflow=null",
)
TIMES: dict[str, tuple[str, ...]] = {
    "fedx": (_tiers(9),),
    "large=quantized_fedavg": ("algorithm.level=large", "algorithm.bits=9", ALL),
    "dadaquant": ("algorithm.fine_tuning={gamma: 0}",),
    "adagq": ("algorithm.bits=9", "algorithm.fine_tuning={gamma: 0}"),
}
"""Comparison of the seconds per phase (FedX, Table IV), with the paper's network and 20 classes of Tiny-ImageNet."""
CODED: dict[str, tuple[str, ...]] = {"fp32=flexfl": MAIN["flexfl"]} | {
    f"bits{bits}=flexfl": (
        *MAIN["flexfl"],
        f"codec.down={{name: qsgd, bits: {bits}}}",
        f"codec.up={{name: qsgd, bits: {bits}}}",
    )
    for bits in (4, 8, 11)
}

VGG = (
    "dataset.train_samples=10000",
    "partition.clients=20",
    "partition.proxy=0.02",
    "model.name=vgg16",
    "model.width=0.25",
    "model.pool_after=[3, 5, 8, 11, 13]",
    "training.fraction=0.2",
    "training.epochs=5",
    "training.batch_size=50",
    "training.lr=0.01",
    "training.lr_decay=0.998",
    "run.precision=bf16",
    "rounds.evaluate_every=5",
    "tracking.mlflow=null",
)
"""VGG16 with a quarter of the channels, and with the pooling and training settings of FlexFL's published code."""
WITH_VGG: dict[str, tuple[str, ...]] = {
    "flexfl": (),
    "heterofl": MAIN["heterofl"],
    "no_kd=flexfl": ("algorithm.kd_weight=0.0",),
    "no_apoz=flexfl": ("algorithm.use_apoz=false",),
}


RESNET = (*_without(VGG, "model."), "model.name=resnet34", "model.width=0.25")
MOBILENET = (*_without(VGG, "model."), "model.name=mobilenetv2", "model.width=0.25")
FEW_IMAGES = (
    *_without(VGG, "dataset.train_samples=", "partition.clients="),
    "partition.clients=10",
    "partition.proxy=0.1",
    "training.fraction=0.4",
    "training.batch_size=10",
)
"""Settings for a part of Tiny-ImageNet: 20 classes, each with 50 images of 64 x 64 pixels."""
OR_HETEROFL = {name: WITH_VGG[name] for name in ("flexfl", "heterofl")}
ON_GPU = "run.devices=[cuda]"
WHOLE_VGG = (*_without(VGG, "model.width="), ON_GPU)
APOZ_OR_NOT = {name: WITH_VGG[name] for name in ("flexfl", "no_apoz=flexfl")}
WITH_APOZ: dict[str, tuple[str, ...]] = {
    "printed=flexfl": (f"algorithm.apoz={list(APOZ['vgg16'])}",),
    "proxy_10=flexfl": ("partition.proxy=0.1", "partition.proxy_shared=true"),
}
"""FlexFL with the APoZ values of its authors' code, and with APoZ measured on five times as many images as usual."""


ALL_CHANNELS = {"flexfl": APOZ_OR_NOT["flexfl"], "heterofl": MAIN["heterofl"], "scalefl": MAIN["scalefl"]}


@dataclass(frozen=True)
class Campaign:
    dataset: str
    partition: tuple[str, ...]
    seeds: str
    rounds: int
    algorithms: Mapping[str, Sequence[str]]
    common: tuple[str, ...] = COMMON
    about: str = ""
    """Last part of the comparison's ID. If this field is empty, the ID ends with the partition rule."""
    to: str = ""
    """Target accuracies. The comparison reports the rounds and seconds until each target is reached."""

    @property
    def id(self) -> str:
        if self.about:
            return f"{self.dataset}-{self.about}"
        rule = next(each for each in self.partition if each.startswith("partition.rule="))
        return f"{self.dataset.rpartition(':')[2].lower()}-{rule.removeprefix('partition.rule=')}"

    @property
    def command(self) -> list[str]:
        own = [f"{a.partition('=')[0]}:{s}" for a, settings in self.algorithms.items() for s in settings]
        settings = (f"dataset.name={self.dataset}", *self.partition, *self.common, f"rounds.stop={self.rounds}", *own)
        options = [word for setting in settings for word in ("--set", setting)]
        labels = ",".join(self.algorithms)
        to = ["--to", self.to] if self.to else []
        return ["flexfleet", "compare", "--algorithms", labels, "--seeds", self.seeds, "--id", self.id, *to, *options]


@dataclass(frozen=True)
class Suite:
    name: str
    rows: str
    seed: int | None = None
    """None for the seeds of the suite."""
    about: str = "suite"
    over: str = ""
    """Parameter with its values (`a.b=value,value`). The comparison has a row for each value."""
    settings: tuple[str, ...] = ()
    """Settings `a.b=value` that override settings of the suite."""

    @property
    def id(self) -> str:
        if self.seed is None:
            return self.name.replace("/", "-")
        return f"{self.name.rpartition('/')[2]}-{self.about}-s{self.seed}"

    @property
    def command(self) -> list[str]:
        seeds = [] if self.seed is None else ["--seeds", str(self.seed)]
        chosen = ["--suite", self.name, "--algorithms", self.rows, *seeds, "--id", self.id]
        over = ["--over", self.over] if self.over else []
        options = [word for setting in ("tracking.mlflow=null", *self.settings) for word in ("--set", setting)]
        return ["flexfleet", "compare", *chosen, *over, *options]


DIRICHLET = ("partition.rule=dirichlet", "partition.alpha=0.3")
IID = ("partition.rule=iid",)
TEN = ("partition.clients=10", "training.fraction=0.4")
SKEWED = ("partition.rule=dirichlet", "partition.alpha=0.1", "evaluate.on=clients", ON_GPU)
STYLES = ("partition.rule=natural", "evaluate.on=clients", "model.norm=static")
FEATURES: dict[str, tuple[str, ...]] = {"fedavg": (), "fedbn": (), "fedper": (), "ditto": ()}
"""FedAvg, and personalised methods for clients whose features differ."""
HALF = ("partition.rule=dirichlet", "partition.alpha=0.5")
DIGITS = ("dataset.name=digits", "dataset.train_samples=null", "dataset.test_samples=null", "rounds.stop=1024")
FEW = ("rounds.stop=20",)
ADAM = ("central.optimizer=adam", "central.epochs=300")
ROLLING = "fedrolex-high,heterofl-high"
DYNAMIC = (
    "fleet.tiers=[{name: any, share: 1.0, memory: 125.0}]",
    "algorithm.selection={name: uniform, model: random}",
    "rounds.stop=256",
)
"""Settings that draw each client's capacity again in every round, as in FedRolex's code."""
TEXT_RULE = ("partition.rule=dirichlet_per_client", "partition.cap=false")  # of the thesis; its code caps clients
CAMPAIGNS: tuple[Campaign | Suite, ...] = (
    Campaign("cifar10", DIRICHLET, "0,1,2", 60, MAIN),
    Campaign("fashion_mnist", DIRICHLET, "0", 40, MAIN),
    Campaign("fashion_mnist", DIRICHLET, "0,1,2", 40, ABLATIONS, about="ablations"),
    Campaign("fashion_mnist", SKEWED, "0,1,2", 40, PERSONAL, about="personal"),
    Campaign("benchmarks.five_styles:FIVE_STYLES", STYLES, "0,1,2", 40, FEATURES),
    Campaign("cifar10", IID, "0", 40, MAIN),
    Campaign("cifar10", IID, "0", 40, ADDITIONS, about="additions"),
    Campaign("cifar10", IID, "0,1,2", 40, OTHERS, about="others"),
    Campaign("fashion_mnist", IID, "0", 40, MAIN),
    Campaign("wisdm_watch", SUBJECTS, "0,1,2", 200, ON_SENSORS, WISDM),
    Campaign("wisdm_watch", (*HALF, *TEN), "0,1,2", 200, ON_SENSORS, WISDM),
    Campaign("aep", HALF, "0", 150, ON_SENSORS, AEP),
    Campaign("cifar10", IID, "0,1,2", 60, WITH_VGG, VGG, "vgg16_iid"),
    Campaign("cifar10", IID, "0,1,2", 60, WITH_APOZ, VGG, "vgg16_apoz"),
    Campaign("cifar10", IID, "0,1,2", 40, APOZ_OR_NOT, WHOLE_VGG, "vgg16_full_width"),
    Campaign("cifar10", IID, "0,1,2", 40, ALL_CHANNELS, WHOLE_VGG, "vgg16_all", "0.5,0.55,0.6"),
    Campaign("cifar10", DIRICHLET, "0,1,2", 60, WITH_VGG, VGG, "vgg16_dirichlet"),
    Campaign("cifar10", IID, "0", 60, OR_HETEROFL, MOBILENET, "mobilenetv2"),
    Campaign("cifar10", IID, "0", 60, OR_HETEROFL, RESNET, "resnet34"),
    Campaign("tiny_imagenet", IID, "0", 60, OR_HETEROFL, FEW_IMAGES, "vgg16"),
    Suite("flexfl/table2-small", "flexfl-iid,heterofl-iid,scalefl-iid,decoupled-iid", 0),
    Campaign("fashion_mnist", DIRICHLET, "0,1,2", 40, NOISY, about="label_noise"),
    Campaign("wisdm_watch", (*HALF, *TEN), "0,1,2", 200, NOISY, WISDM, "label_noise"),
    Campaign("fashion_mnist", DIRICHLET, "0,1,2", 100, FULL_AND_BRANCHES, BRANCHED, "branches", "0.5,0.6,0.7"),
    Campaign("fashion_mnist", DIRICHLET, "0", 100, WITH_OTHERS, BRANCHED, "branches_and_others", "0.5,0.6,0.7,0.8"),
    Campaign("cifar10", IID, "0,1,2", 40, QUANTISED, OWNED, "server_classes"),
    Campaign("cifar10", IID, "0,1,2", 40, SIZES, (*_without(OWNED, "fleet."), STRONG), "fedx_sizes"),
    Campaign("cifar10", IID, "0", 40, SHARES, OWNED, "share_of_medium"),
    Campaign("cifar10", IID, "0", 40, CODED, about="flexfl_bits"),
    Campaign("tiny_imagenet", IID, "0", 12, TIMES, TIMED, "times"),
    Campaign("shakespeare_text", TRANSFORMER, "0", 300, ON_TEXT, TEXT, "transformer"),
    Campaign("shakespeare_text", LSTM, "0", 300, WITH_LSTM, TEXT, "lstm"),
    Suite("adaptivefl/figure5-small", "cs,c,s,random,greed"),
    Suite("adaptivefl/table4-small", "coarse,fine"),
    Suite("fedrolex/table3.2-small", ROLLING, 100, "rates", "training.lr=0.02,0.05,0.1"),
    *(Suite("fedrolex/table3.2-small", ROLLING, seed) for seed in (0, 1, 2)),
    Suite("fedrolex/figure3.4-small", "fedrolex,federated_dropout"),
    *(Suite("fedrolex/rounds-small", "fedrolex,heterofl", seed, "dynamic", settings=DYNAMIC) for seed in (0, 1, 2)),
    Suite("fedrolex/rounds-small", "fedrolex,heterofl", 0, "digits", settings=DIGITS),
    *(Suite("fedrolex/rounds-small", "fedrolex,heterofl", seed) for seed in (0, 1, 2)),
    Suite("fedaiot/aep", "fedavg-low,fedavg-high,fedavg-30,fp16,central", 0),
    *(Suite("fedaiot/aep", "fedavg-low,central", seed, "central", settings=FEW) for seed in (1, 2)),
    Suite("fedaiot/aep", "fedavg-low,central", 0, "central_adam", settings=(*FEW, *ADAM)),
    Suite("fedaiot/aep", "fedopt-low,fedopt-high", 0, "fedopt_printed", settings=FEW),
    *(
        Suite("fedaiot/aep", "fedopt-low,fedopt-high", seed, "fedopt", "algorithm.server.lr=0.001")
        for seed in (0, 1, 2)
    ),
    *(Suite("fedaiot/aep-code", "fedavg-low,fedavg-high", seed) for seed in (0, 1, 2)),
    *(Suite("fedaiot/aep-code", "fedavg-30,fp16", seed, "clients_and_precision") for seed in (0, 1, 2)),
    Suite("fedaiot/aep-code", "fedavg-high", 0, "per_client", settings=(*TEXT_RULE, "rounds.stop=700")),
    Suite("fedaiot/aep-code", "fedavg-30", 0, "per_client_30", settings=(*TEXT_RULE, "rounds.stop=300")),
)


def run(campaign: Campaign | Suite) -> dict[str, Any]:
    """Execute the missing runs of a campaign and return the contents of its comparison.json."""
    jobs = str(os.cpu_count() or 1)
    local = ["--resume", "--jobs", jobs, "--set", f"run.store={STORE}"]
    program = [sys.executable, "-m", "flexfleet.cli.main", *campaign.command[1:], *local]
    code = subprocess.run(program, check=False).returncode
    if code != 0:
        raise SystemExit(
            f"{campaign.id} failed with exit status {code}. Fix the cause and restart; finished runs are kept"
        )
    found: dict[str, Any] = json.loads((STORE / campaign.id / "comparison.json").read_text("utf-8"))
    return found


def write_tables() -> None:
    """Write the tables of all finished comparisons into one file. The title of each comparison starts with its ID."""
    pages = {campaign.id: STORE / campaign.id / "comparison.md" for campaign in CAMPAIGNS}
    texts = [
        page.read_text("utf-8").strip().replace("## ", f"## {id}: ", 1).replace("](comparison.", f"]({id}/comparison.")
        for id, page in pages.items()
        if page.exists()
    ]
    (STORE / "tables.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def main(names: Sequence[str]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    OUT.mkdir(parents=True, exist_ok=True)
    known = [campaign.id for campaign in CAMPAIGNS]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"unknown comparison {unknown[0]!r}; choose from {', '.join(known)}")
    path = OUT / "results.json"
    for campaign in CAMPAIGNS:
        if names and campaign.id not in names:
            continue
        if not names and ON_GPU in campaign.command and not torch.cuda.is_available():
            print(f"skipping {campaign.id}, which requires a GPU; published results are unchanged", flush=True)
            continue
        found = run(campaign)
        folder = STORE / campaign.id
        # Read the results only now, because another process may have changed the file during the runs.
        results: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        results[campaign.id] = {"command": shlex.join(campaign.command), "comparison": found}
        shutil.copyfile(folder / "comparison.svg", OUT / f"{campaign.id}.svg")
        if (folder / CLIENTS_FILE).exists():
            shutil.copyfile(folder / CLIENTS_FILE, OUT / f"{campaign.id}-clients.svg")
        path.write_text(
            json.dumps({name: results[name] for name in known if name in results}, indent=1) + "\n", encoding="utf-8"
        )
        print((folder / "comparison.md").read_text("utf-8"))
    write_tables()


if __name__ == "__main__":
    main(sys.argv[1:])

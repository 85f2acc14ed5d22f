"""Registry of algorithms. List a new algorithm in `ALGORITHMS` and a new preset in `PRESETS`.

`import X as X` also exports the class from this package for type checkers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_engine.algorithms.adagq import AdaGQ as AdaGQ
from fl_engine.algorithms.adaptivefl import AdaptiveFL as AdaptiveFL
from fl_engine.algorithms.dadaquant import DAdaQuant as DAdaQuant
from fl_engine.algorithms.decoupled import Decoupled as Decoupled
from fl_engine.algorithms.depthfl import DepthFL as DepthFL
from fl_engine.algorithms.ditto import Ditto as Ditto
from fl_engine.algorithms.fedavg import FedAvg as FedAvg
from fl_engine.algorithms.fedavg import FedSGD as FedSGD
from fl_engine.algorithms.fedbn import FedBN as FedBN
from fl_engine.algorithms.federated_dropout import FederatedDropout as FederatedDropout
from fl_engine.algorithms.fednova import FedNova as FedNova
from fl_engine.algorithms.fedper import FedPer as FedPer
from fl_engine.algorithms.fedrolex import FedRolex as FedRolex
from fl_engine.algorithms.fedx import FedX as FedX
from fl_engine.algorithms.fjord import FjORD as FjORD
from fl_engine.algorithms.flexfl import FlexFL as FlexFL
from fl_engine.algorithms.heterofl import HeteroFL as HeteroFL
from fl_engine.algorithms.multibranch import MultiBranch as MultiBranch
from fl_engine.algorithms.qffl import QFFL as QFFL
from fl_engine.algorithms.quantized_fedavg import QuantizedFedAvg as QuantizedFedAvg
from fl_engine.algorithms.scaffold import Scaffold as Scaffold
from fl_engine.algorithms.scalefl import ScaleFL as ScaleFL
from fl_engine.core.contracts import (
    Algorithm,
    ChoosesNetwork,
    HasPersonalModels,
    KeepsClientState,
    MeasuresClients,
    RemembersChanges,
    Searched,
)
from fl_engine.core.registry import Contract

ALGORITHMS: dict[str, type[Algorithm]] = {
    "adagq": AdaGQ,
    "adaptivefl": AdaptiveFL,
    "dadaquant": DAdaQuant,
    "decoupled": Decoupled,
    "depthfl": DepthFL,
    "ditto": Ditto,
    "federated_dropout": FederatedDropout,
    "fedavg": FedAvg,
    "fedbn": FedBN,
    "fednova": FedNova,
    "fedper": FedPer,
    "fedrolex": FedRolex,
    "fedsgd": FedSGD,
    "fedx": FedX,
    "fjord": FjORD,
    "flexfl": FlexFL,
    "heterofl": HeteroFL,
    "multibranch": MultiBranch,
    "qffl": QFFL,
    "quantized_fedavg": QuantizedFedAvg,
    "scaffold": Scaffold,
    "scalefl": ScaleFL,
}


@dataclass(frozen=True)
class Preset:
    """Alternative name of an algorithm, with other default options."""

    algorithm: str
    """Name of the algorithm in `ALGORITHMS`."""
    meaning: str
    """Description that `flexfleet list algorithms` prints."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Map keys of the section `algorithm` to values that replace the algorithm's defaults."""


PRESETS: dict[str, Preset] = {
    "all_large": Preset("fedavg", "FedAvg under the name of FlexFL's tables"),
    "fedopt": Preset(
        "fedavg",
        "FedOpt: FedAvg whose server steps with Adam, Yogi or Adagrad (Reddi et al., ICLR 2021)",
        {"server": {"name": "adam"}},
    ),
    "fedprox": Preset(
        "fedavg",
        "FedProx: FedAvg with a proximal term that holds clients close to the model they were sent (Li et al., MLSys "
        "2020)",
        {"mu": 0.01},
    ),
    "fedx_large": Preset("fedx", "FedX-Large: FedX with the large sub-network on every device", {"level": "large"}),
    "fedx_medium": Preset("fedx", "FedX-Medium: FedX with the medium sub-network on every device", {"level": "medium"}),
    "fedx_small": Preset("fedx", "FedX-Small: FedX with the small sub-network on every device", {"level": "small"}),
}

CONTRACT = Contract(
    "algorithm",
    ALGORITHMS | {name: ALGORITHMS[preset.algorithm] for name, preset in PRESETS.items()},
    Algorithm,
    needs=("training",),
    optional=(ChoosesNetwork, RemembersChanges, Searched, MeasuresClients, KeepsClientState, HasPersonalModels),
)
"""Attributes and methods that every algorithm must have."""


def options_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the section `algorithm`. If the section's `name` is a preset, add those options of the
    preset that the section does not set."""
    preset = PRESETS.get(section["name"])
    given = {key: value for key, value in section.items() if key != "name"}
    return {**(preset.options if preset else {}), **given}

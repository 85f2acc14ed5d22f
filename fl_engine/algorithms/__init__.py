"""The algorithms. A new one is a file and a line here."""

from fl_engine.algorithms.adagq import AdaGQ
from fl_engine.algorithms.adaptivefl import AdaptiveFL
from fl_engine.algorithms.dadaquant import DAdaQuant
from fl_engine.algorithms.decoupled import Decoupled
from fl_engine.algorithms.depthfl import DepthFL
from fl_engine.algorithms.fedavg import FedAvg, FedOpt, FedProx
from fl_engine.algorithms.federated_dropout import FederatedDropout
from fl_engine.algorithms.fedrolex import FedRolex
from fl_engine.algorithms.fedsgd import FedSGD
from fl_engine.algorithms.fedx import FedX, FedXLarge, FedXMedium, FedXSmall
from fl_engine.algorithms.fjord import FjORD
from fl_engine.algorithms.flexfl import FlexFL
from fl_engine.algorithms.heterofl import HeteroFL
from fl_engine.algorithms.multibranch import MultiBranch
from fl_engine.algorithms.quantized_fedavg import QuantizedFedAvg
from fl_engine.algorithms.scalefl import ScaleFL
from fl_engine.core.contracts import Algorithm, ChoosesNetwork, KeepsClientState, MeasuresClients, Searched
from fl_engine.core.registry import Contract

ALGORITHMS: dict[str, type[Algorithm]] = {
    "adagq": AdaGQ,
    "adaptivefl": AdaptiveFL,
    "all_large": FedAvg,
    "dadaquant": DAdaQuant,
    "decoupled": Decoupled,
    "depthfl": DepthFL,
    "federated_dropout": FederatedDropout,
    "fedavg": FedAvg,
    "fedopt": FedOpt,
    "fedprox": FedProx,
    "fedrolex": FedRolex,
    "fedsgd": FedSGD,
    "fedx": FedX,
    "fedx_large": FedXLarge,
    "fedx_medium": FedXMedium,
    "fedx_small": FedXSmall,
    "fjord": FjORD,
    "flexfl": FlexFL,
    "heterofl": HeteroFL,
    "multibranch": MultiBranch,
    "quantized_fedavg": QuantizedFedAvg,
    "scalefl": ScaleFL,
}

CONTRACT = Contract(
    "algorithm",
    ALGORITHMS,
    Algorithm,
    needs=("training",),
    optional=(ChoosesNetwork, Searched, MeasuresClients, KeepsClientState),
)
"""What an algorithm must have, and what it may have."""

__all__ = [
    "ALGORITHMS",
    "CONTRACT",
    "AdaGQ",
    "AdaptiveFL",
    "DAdaQuant",
    "Decoupled",
    "DepthFL",
    "FedAvg",
    "FedOpt",
    "FedProx",
    "FedRolex",
    "FedSGD",
    "FedX",
    "FedXLarge",
    "FedXMedium",
    "FedXSmall",
    "FederatedDropout",
    "FjORD",
    "FlexFL",
    "HeteroFL",
    "MultiBranch",
    "QuantizedFedAvg",
    "ScaleFL",
]

"""Convert any `nn.Module` to a network of flexfleet with `from_module`.

Algorithms that send the whole model train the unchanged module. For all other algorithms, torch.fx traces the forward
to a graph, and `flow` determines the channels of each tensor. The output channels of a layer are the input channels of
the next layer, and tensors that are added have the same channels. Groups, slots and prunable layers are derived from
the channels. If an operation, such as attention or layer norm, mixes channels, sub-models keep all of these channels.
"""

from fl_engine.models.traced.family import from_module
from fl_engine.models.traced.user_module import makes_module

__all__ = ["from_module", "makes_module"]

"""Any `nn.Module` as a network here: `from_module`.

An algorithm that sends the whole model trains the module as it is. For other algorithms its forward is traced with
torch.fx, and the channels are followed through it: a layer makes channels, the next one takes them, and tensors that
are added have the same channels. The groups, slots and prunable layers follow from that. An operation that would mix
channels is refused; the error has the place and the ways out.
"""

from fl_engine.models.traced.family import from_module
from fl_engine.models.traced.user_module import makes_module

__all__ = ["from_module", "makes_module"]

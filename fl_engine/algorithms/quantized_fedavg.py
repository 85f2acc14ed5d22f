"""Quantized FedAvg, a baseline of FedX (Lai et al., arXiv:2504.12849, Section IV-D): all devices train the same
sub-network, and the server sends the sub-network's weights quantised by QSGD. The server has no data and does not
fine-tune.

`level` selects FedX's Quantized FedAvg-Small, -Medium or -Large. Only the selected sub-network is trained and
evaluated, and the metric `full` is its accuracy. In `model.safetensors`, all other weights have their initial values.

Departs from the paper, in which clients return unquantised weights ("quantization is done at the server in these
variants"). Here the option `bits_up` can quantise the returned changes. QSGD uses one norm for every 512 elements, or
one norm per tensor with `bucket: null`. The run's `codec` is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_engine.algorithms.levels import WIDTHS, Bits, Widths, nested_pool
from fl_engine.algorithms.pooled import PooledAlgorithm, StaticBN, check_fits
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Count
from fl_engine.core.types import Assignment, Codecs, LocalTask, Pool, Prepared, TaskContext
from fl_engine.core.widths import Size
from fl_engine.selection import Selection, Uniform


@dataclass(frozen=True)
class QuantizedFedAvg(PooledAlgorithm):
    level: Size = "large"
    """Sub-network that all devices train."""
    widths: Widths = WIDTHS
    """Ascending width ratios that end with 1. Ignored if the network defines its own nested sub-networks."""
    bits: Bits = 8
    """Number of QSGD bits for the weights that the server sends."""
    bits_up: Bits | None = None
    """Number of QSGD bits for the changes that devices return; null: devices return unquantised weights."""
    bucket: Count | None = 512
    """Number of consecutive elements with a common norm in QSGD; null: one norm per tensor."""
    eligible: Literal["all", "capable"] = "all"
    """Devices that can be selected. all: every device; capable: only devices whose memory can hold the sub-network."""
    static_bn: StaticBN = "kept"
    selection: Selection = Uniform(model="largest")

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        up = None if self.bits_up is None else Qsgd(bits=self.bits_up, bucket=self.bucket)
        codecs = Codecs(down=Qsgd(bits=self.bits, bucket=self.bucket), up=up)
        return nested_pool(self, family, self.widths, codecs, (self.level,))

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable" or self.on_too_small == "fail":
            check_fits(ctx, assignment.level)
        return self.local_task(assignment, assignment.spec)

"""Quantized FedAvg, a baseline of FedX (Lai et al., Section IV-D): FedAvg of one sub-network, the same on all
devices, which the server sends quantised by QSGD. The server holds no data, and does not fine-tune.

`level` is FedX's Quantized FedAvg-Small, -Medium or -Large. Only this sub-network trains, so it is the whole pool, and
`full` is its accuracy; `model.safetensors` has the network's other weights as they were initialised.

Departs from the paper: weights come back as trained ("quantization is done at the server in these variants"); `bits_up`
quantises their change too. Every device takes part; with `eligible: capable`, as in `all_large`, only those that
can hold the sub-network. QSGD has a norm for every 512 elements; `bucket: null` is one for each tensor. The run's
`codec` is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_engine.algorithms.levels import WIDTHS, Bits, Widths, nested_member
from fl_engine.algorithms.pooled import PooledAlgorithm, StaticBN, check_fits
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core.contracts import ModelFamily, ServerContext
from fl_engine.core.fields import Count
from fl_engine.core.types import Codecs, LocalTask, Pool, Prepared, TaskContext, WorkOrder
from fl_engine.core.widths import Size
from fl_engine.selection import Selection, Uniform


@dataclass(frozen=True)
class QuantizedFedAvg(PooledAlgorithm):
    level: Size = "large"
    """The sub-network that all devices train."""
    widths: Widths = WIDTHS
    """Width ratios of small, medium and large, ascending to 1, of a network that has no nested sub-networks of its
    own."""
    bits: Bits = 8
    """Bits of QSGD for the weights that the server sends."""
    bits_up: Bits | None = None
    """Bits of QSGD for the change that a device sends back; null: it sends its weights unchanged."""
    bucket: Count | None = 512
    """Elements that share a norm in QSGD; null: one norm per tensor."""
    eligible: Literal["all", "capable"] = "all"
    """Which devices take part. `all`: every device, whatever it can hold; `capable`: those that can hold the
    sub-network."""
    static_bn: StaticBN = "kept"
    selection: Selection = Uniform(model="largest")

    def pool(self, family: ModelFamily, prepared: Prepared, server: ServerContext) -> Pool:
        up = None if self.bits_up is None else Qsgd(bits=self.bits_up, bucket=self.bucket)
        codecs = Codecs(down=Qsgd(bits=self.bits, bucket=self.bucket), up=up)
        return (nested_member(self, family, self.level, self.widths, codecs),)

    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        if self.eligible == "capable" or self.on_too_small == "fail":
            check_fits(ctx, order.level)
        return self.local_task(order, order.spec)

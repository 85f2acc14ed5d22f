"""The benchmark of AdaPrune: what it cuts, and its table."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.adaprune import BATCH, _order, _pruned, measured
from benchmarks.pools import site_of
from fl_engine.algorithms import FlexFL
from fl_engine.core.slicing import full_shapes, initial_params, shapes
from fl_engine.models.vgg16 import VGG16

TINY = VGG16((3, 32, 32), 10, fc=(64, 64), width=0.25)


def test_a_client_cuts_what_it_is_sent_to_the_next_smaller_model() -> None:
    algorithm = FlexFL()
    site = site_of(TINY, algorithm, BATCH)
    assert [m.name for m in site.pool] == ["M1", "M2'", "M2", "M3'", "M3"]
    order = _order(site, initial_params(TINY, 0), 4)
    for free, level in ((100 * site.pool[3].share, 3), (math.inf, 4)):
        cut = _pruned(algorithm, order, replace(site, free=math.nextafter(free, math.inf)))
        expected = shapes(site.layout, site.pool[level].spec, full_shapes(TINY))
        assert {name: tuple(t.shape) for name, t in cut.items()} == dict(expected)
        assert all(t.nbytes == t.untyped_storage().nbytes() for t in cut.values()), "what was received can be dropped"
        same = [name for name, t in cut.items() if t.data_ptr() == order.payload[name].data_ptr()]
        assert (len(same) == len(cut)) == (level == 4), "what is not cut is not copied"


def test_rows_are_the_dispatched_models() -> None:
    rows = measured(TINY, 1, 1)
    assert [(row.sent, row.trained) for row in rows] == [("M3", "M3'"), ("M2", "M2'"), ("M1", "M1")]
    assert all(0 < seconds < math.inf for row in rows for seconds in (row.pruning, row.training, row.alone))

"""Test suite for networks. Subclass `ModelSuite` and define the fixture `family`.

    class TestModels(ModelSuite):
        @pytest.fixture(params=sorted(MODELS))
        def family(self, request): ...

Use networks with few channels, because the suite runs each network several hundred times.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fl_engine.core import costs, slicing
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, HEAD, ParamLayout, Params, SubmodelSpec
from fl_engine.models.export import by_batch
from fl_engine.models.traced.verify import spread
from fl_engine.testing import law
from fl_engine.testing.tiny import assert_same_bits


@st.composite
def specs(draw: st.DrawFn, family: ModelFamily, inside: SubmodelSpec = FULL) -> SubmodelSpec:
    """Draw a sub-model of `inside`. Each group keeps all its channels, a prefix of them, or an arbitrary subset. For
    some of the layout's `choices`, channels are drawn separately from their group. Some blocks are dropped."""
    layout = family.layout()
    keep: dict[str, Sequence[int]] = {}
    for group in layout.groups:
        channels = kept_channels(layout, inside, group)
        kind = draw(st.sampled_from(("all", "prefix", "some")))
        if kind == "prefix":
            channels = channels[: draw(st.integers(1, len(channels)))]
        elif kind == "some":
            places = draw(st.sets(st.integers(0, len(channels) - 1), min_size=1))
            channels = [channels[place] for place in sorted(places)]
        keep[group] = channels
    for choice, of in layout.choices.items():
        if choice in inside.kept or draw(st.booleans()):
            count, held = len(keep[str(of)]), kept_channels(layout, inside, choice)
            places = draw(st.sets(st.integers(0, len(held) - 1), min_size=count, max_size=count))
            keep[choice] = [held[place] for place in sorted(places)]
    drops = [b for b in droppable(family) if draw(st.integers(0, 3)) == 0]
    blocks = [b for b in layout.blocks if layout.has_block(inside, b) and b not in drops]
    return SubmodelSpec.of(keep, None if len(blocks) == len(layout.blocks) else blocks)


@lru_cache(maxsize=32)
def droppable(family: ModelFamily) -> tuple[str, ...]:
    """Return the blocks that the network can drop."""
    blocks = family.layout().blocks
    return tuple(block for block in blocks if _built(family, _without(blocks, block)) is not None)


def _without(blocks: Sequence[str], block: str) -> SubmodelSpec:
    return SubmodelSpec.of({}, [b for b in blocks if b != block])


def _built(family: ModelFamily, spec: SubmodelSpec) -> nn.Module | None:
    try:
        with torch.device("meta"):
            return family.module(spec)
    except ModelError:
        return None


def kept_channels(layout: ParamLayout, spec: SubmodelSpec, group: str) -> list[int]:
    keep = layout.indices(spec, group)
    return list(range(keep)) if isinstance(keep, int) else list(keep)


@lru_cache(maxsize=32)
def random_params(family: ModelFamily) -> Params:
    """Return random double-precision weights for the full network. Callers must not change the cached tensors."""
    return {name: tensor.double() for name, tensor in spread(slicing.initial_params(family, seed=7)).items()}


def samples(family: ModelFamily, count: int) -> Tensor:
    return slicing.made_up(family, count, torch.Generator().manual_seed(11))


def kept_mask(layout: ParamLayout, spec: SubmodelSpec, name: str, shape: torch.Size) -> Tensor:
    """Return a bool mask of a parameter's elements that the sub-model contains, computed without `take`."""
    slot = layout.slots[name]
    mask = torch.full(shape, layout.has_block(spec, slot.block))
    for dim, axis in enumerate(slot.axes):
        runs: list[Tensor] = []
        for part in axis.parts:
            size = shape[dim] if axis.then is None else part.each * layout.groups.get(part.group or "", 1)
            channel = torch.arange(size) % (size // part.copies) // part.repeat
            every = torch.full((size,), True)
            key = part.key
            runs.append(every if key is None else torch.isin(channel, torch.tensor(kept_channels(layout, spec, key))))
        mask &= torch.cat(runs).view([-1 if d == dim else 1 for d in range(len(shape))])
    return mask


def zeroed(family: ModelFamily, spec: SubmodelSpec, params: Params) -> nn.Module:
    """Return the full network in evaluation mode, with all weights outside the sub-model set to 0. Group and layer
    norms compute statistics only from the sub-model's channels."""
    layout, buffers = family.layout(), {name for name, _ in family.module().named_buffers()}
    kept = {name: kept_mask(layout, spec, name, t.shape) for name, t in params.items()}
    rest = {name: t if name in buffers else t * kept[name] for name, t in params.items()}
    whole = slicing.runnable(family, FULL, rest).eval()
    for name, layer in whole.named_modules():
        if isinstance(layer, nn.GroupNorm):
            layer.forward = partial(_over_kept, layer, kept[f"{name}.weight"])  # type: ignore[method-assign]
        elif isinstance(layer, nn.LayerNorm):
            layer.forward = partial(_over_kept_last, layer, kept[f"{name}.weight"])  # type: ignore[method-assign]
    return whole


class ModelSuite:
    """Test suite that requires a fixture `family`, which returns a `ModelFamily`. Subclasses may override `static`."""

    def static(self, family: ModelFamily) -> ModelFamily:
        """Return the network with the option `norm="static"` (stored batch-norm statistics) if the option exists."""
        return dataclasses.replace(cast(Any, family), norm="static") if hasattr(family, "norm") else family

    # --- the full network
    @pytest.fixture(autouse=True)
    def the_same_first_weights(self) -> None:
        """Set the seed, because with some initial weights all ReLUs of a narrow layer return 0."""
        torch.manual_seed(1)

    def test_state_and_layout_agree_in_names_order_and_sizes(self, family: ModelFamily) -> None:
        again = dataclasses.replace(cast(Any, family))
        assert again == family and hash(again) == hash(family)
        assert family.layout().groups[HEAD] == family.outputs
        if hasattr(family, "min_hw"):
            assert min(family.input_shape[1:]) >= family.min_hw
        for variant in (family, self.static(family)):
            layout, state = variant.layout(), slicing.full_shapes(variant)
            assert {name for name, _ in variant.module().named_buffers()} <= set(layout.slots)
            assert list(state) == list(layout.slots)
            for name, slot in layout.slots.items():
                assert len(slot.axes) == len(state[name]), name
                for size, axis in zip(state[name], slot.axes, strict=True):
                    assert size == axis.length(size, layout.groups.__getitem__), name

    def test_forward_gives_outputs_that_depend_on_the_sample(self, family: ModelFamily) -> None:
        with torch.no_grad():
            outputs = family.module().eval()(samples(family, 3))
        assert outputs.shape[:2] == (3, family.outputs)
        assert torch.isfinite(outputs).all()
        assert not torch.equal(outputs[0], outputs[1])

    def test_sample_has_the_same_outputs_alone_and_in_a_batch(self, family: ModelFamily) -> None:
        """The test uses evaluation mode and fixed batch-norm statistics."""
        static = self.static(family)
        module, x = slicing.runnable(static, FULL, random_params(static)).eval(), _in_double(samples(static, 3))
        if by_batch(module):
            pytest.skip("the network normalises by its batch and does not store statistics")
        with torch.no_grad():
            alone, among = module(x[:1]), module(x)[:1]
        assert alone.shape == among.shape
        torch.testing.assert_close(alone, among, rtol=1e-7, atol=1e-9)

    def test_gradients_reach_every_parameter(self, family: ModelFamily) -> None:
        module = family.module().train()
        module(samples(family, 4)).square().sum().backward()
        assert [name for name, p in module.named_parameters() if p.grad is None] == []

    def test_static_statistics_move_in_training_only(self, family: ModelFamily) -> None:
        module = self.static(family).module()
        before = {name: b.clone() for name, b in module.named_buffers()}
        module.eval()(samples(family, 4))
        assert_same_bits(before, dict(module.named_buffers()))
        module.train()(samples(family, 4))
        assert all(not torch.equal(before[name], b) for name, b in module.named_buffers())

    # --- sub-networks
    @law
    @given(data=st.data())
    def test_slices_are_what_their_axes_and_modules_say(self, family: ModelFamily, data: st.DataObject) -> None:
        """A slice of a sub-model's weights must equal the slice that is cut directly from the full network."""
        layout, params = family.layout(), random_params(family)
        outer = data.draw(specs(family))
        slices = take(params, layout, outer)
        for name, tensor in slices.items():
            assert torch.equal(tensor.flatten(), params[name][kept_mask(layout, outer, name, params[name].shape)]), name
        with torch.device("meta"):
            state = family.module(outer).state_dict()
        expected = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
        assert expected == [(name, tuple(tensor.shape)) for name, tensor in slices.items()]
        assert expected == list(slicing.shapes(layout, outer, slicing.full_shapes(family)).items())
        assert costs.count_params(family, outer) == sum(t.numel() for t in state.values())
        inner = data.draw(specs(family, inside=outer))
        assert slicing.contains(layout, outer, inner)
        assert_same_bits(take(slices, layout, inner, have=outer), take(params, layout, inner))

    @law
    @given(data=st.data())
    def test_slice_runs_like_the_network_with_the_rest_zeroed(self, family: ModelFamily, data: st.DataObject) -> None:
        """Batch norms use stored statistics. Group and layer norms compute statistics from the sub-model's channels."""
        static = self.static(family)
        spec = data.draw(specs(static))
        layout, params, x = static.layout(), random_params(static), _in_double(samples(static, 2))
        with torch.no_grad():
            sub = slicing.runnable(static, spec, take(params, layout, spec)).eval()(x)
            full = zeroed(static, spec, params)(x)
        torch.testing.assert_close(sub, full[:, kept_channels(layout, spec, HEAD)], rtol=1e-7, atol=1e-9)

    def test_a_smaller_network_costs_less(self, family: ModelFamily) -> None:
        layout = family.layout()
        half = SubmodelSpec.of({g: max(1, n // 2) for g, n in layout.groups.items() if g != HEAD})
        assert 0 < costs.count_params(family, half) < costs.count_params(family)
        assert 0 < costs.count_macs(family, half) < costs.count_macs(family)

    def test_a_block_is_skipped_or_its_absence_refused_by_name(self, family: ModelFamily) -> None:
        layout = family.layout()
        for block in layout.blocks:
            spec = _without(layout.blocks, block)
            if block not in droppable(family):
                with pytest.raises(ModelError):
                    family.module(spec)
                continue
            with torch.no_grad():
                assert family.module(spec).eval()(samples(family, 2)).shape[:2] == (2, family.outputs)

    def test_a_slice_out_of_range_is_an_error(self, family: ModelFamily) -> None:
        layout, params = family.layout(), random_params(family)
        for group, size in layout.groups.items():
            wrong: list[int | tuple[int, ...]] = [size + 1, (0, size)]
            for keep in wrong:
                with pytest.raises(ModelError):
                    take(params, layout, SubmodelSpec.of({group: keep}))
                with pytest.raises(ModelError):
                    family.module(SubmodelSpec.of({group: keep}))

    # --- prunable layers
    def test_prunable_layers_are_disjoint_groups_in_network_order(self, family: ModelFamily) -> None:
        """The head is not prunable."""
        layout, prunable = family.layout(), [layer.group for layer in family.prunable()]
        assert prunable and prunable == [g for g in layout.groups if g in prunable and g != HEAD]
        covered = [{n for n in layout.slots if n.startswith(layer.params)} for layer in family.prunable()]
        assert all(covered) and all(not a & b for a, b in combinations(covered, 2))
        for layer, names in zip(family.prunable(), covered, strict=True):
            assert all(any(name.startswith(prefix) for name in names) for prefix in layer.params)
            axes = [axis for name in names for axis in layout.slots[name].axes]
            groups = {part.group for axis in axes for part in axis.parts}
            assert layer.group in groups and HEAD not in groups

    def test_prunable_activations_are_the_relus_and_run_once(self, family: ModelFamily) -> None:
        module, runs = family.module().eval(), Counter[str]()
        relus = [name for name, m in module.named_modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
        names = [name for layer in family.prunable() for name in layer.activations]
        for layer in family.prunable():
            assert sorted(layer.activations) == sorted(r for r in relus if r.startswith(layer.params))
        for name in names:
            module.get_submodule(name).register_forward_hook(lambda *_, name=name: runs.update([name]))
        with torch.no_grad():
            module(samples(family, 2))
        assert runs == dict.fromkeys(names, 1)


def _over_kept(norm: nn.GroupNorm, kept: Tensor, x: Tensor) -> Tensor:
    """Apply `norm` to x (B, C, ...). A group's statistics are computed from the channels in the mask `kept`."""
    parts = x.view(len(x), norm.num_groups, len(kept) // norm.num_groups, -1)
    mask = kept.to(x.dtype).view(norm.num_groups, -1, 1).expand(parts.shape[1:])
    count = mask.sum((1, 2)).clamp(min=1).view(-1, 1, 1)  # The sum is 0 for a dropped block.
    centred = parts - (parts * mask).sum((2, 3), keepdim=True) / count
    variance = (centred.square() * mask).sum((2, 3), keepdim=True) / count
    shape = (-1, *[1] * (x.dim() - 2))
    normal = (centred / (variance + norm.eps).sqrt()).reshape(x.shape)
    out: Tensor = normal * norm.weight.view(shape) + norm.bias.view(shape)
    return out


def _over_kept_last(norm: nn.LayerNorm, kept: Tensor, x: Tensor) -> Tensor:
    """Apply `norm` to x (..., C). The statistics are computed from the channels in the mask `kept` (C,)."""
    of_kept = x[..., kept]
    centred = x - of_kept.mean(-1, keepdim=True)
    normal = centred / (of_kept.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    out: Tensor = normal * norm.weight + norm.bias
    return out


def _in_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x

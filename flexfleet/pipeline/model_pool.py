"""Step 3: build the pool of sub-models. The algorithm determines the pool, and can use the results of its preparations.
Initial weights from a preparation or from `model.init` are stored next to the pool."""

from __future__ import annotations

from pathlib import Path

from fl_engine.codecs import sections_of
from fl_engine.core import pool as pools
from fl_engine.core.contracts import Algorithm, ModelFamily, ServerContext
from fl_engine.core.types import Params, Prepared
from fl_engine.exchange import coding
from fl_engine.preparation.apoz import ApozScores
from fl_engine.preparation.weights import given
from fl_engine.storage.store import FolderStore, encode, sha256
from flexfleet import config as configs
from flexfleet.config import Config
from flexfleet.files import prepared
from flexfleet.files.artifacts import AS_IN_POOL, WEIGHTS, Level, PoolFile
from flexfleet.pipeline.partition import server_of
from flexfleet.pipeline.prepare import Resolved


def model_pool(resolved: Resolved, pretrain: Path, out: Path) -> Path:
    """Write pool.json into `out`. If the initial weights are not random, also write weights.safetensors. Raises
    PoolError if the target sizes cannot be reached, and the errors of `Resolved.start`."""
    algorithm = resolved.algorithm
    made = prepared.read(pretrain, algorithm.preparations)
    weights = resolved.start or given(made)
    built = build(resolved.config, algorithm, resolved.family, made, server_of(resolved), weights)
    if weights:
        FolderStore(out).put(WEIGHTS, encode(weights))
    else:
        (out / WEIGHTS).unlink(missing_ok=True)
    return built.write(out / "pool.json")


def build(
    config: Config, algorithm: Algorithm, family: ModelFamily, made: Prepared, server: ServerContext, weights: Params
) -> PoolFile:
    """Return the contents of pool.json. With `pretrain.reference`, the contents include the similarity of the pruning
    ratios to the reference pool. `weights`: initial weights for the rounds; empty for random weights."""
    pool = coding.add_sizes(pools.pool_of(algorithm, family, made, server), family, configs.codecs(config))
    references = {name: each.as_reference() for name, each in made.items() if isinstance(each, ApozScores)}
    reference = pools.pool_of(algorithm, family, {**made, **references}, server) if any(references.values()) else None
    groups = [p.group for p in family.prunable()]
    layout = family.layout()
    return PoolFile(
        algorithm=config.algorithm["name"],
        model=config.model["name"],
        input_chw=family.input_shape,
        classes=family.outputs,
        groups={g: layout.groups[g] for g in groups},
        weights_sha256=sha256(encode(weights)) if weights else None,
        levels=tuple(
            Level(
                **{name: getattr(m, name) for name in AS_IN_POOL},
                bytes=m.bytes,
                widths={g: layout.width(m.spec, g) for g in groups},
                similarity=pools.similarity(m.ratios, reference[i].ratios) if reference else None,
                spec=m.spec.to_json(),
                codecs=None if m.codecs is None else sections_of(m.codecs),
                bytes_up=None if m.sizes is None else m.bytes_up,
                tiers={tier: None if codecs is None else sections_of(codecs) for tier, codecs in m.tiers},
            )
            for i, m in enumerate(pool)
        ),
    )

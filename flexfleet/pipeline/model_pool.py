"""Step 3: build the pool of sub-models, from the results of the preparations or by the algorithm's own rule. Weights of
a preparation or of `model.init`, from which the rounds start, are stored beside it."""

from __future__ import annotations

from collections.abc import Sequence
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
from flexfleet.files import prepared, terminal
from flexfleet.files.artifacts import WEIGHTS, Level, PoolFile
from flexfleet.pipeline.partition import server_of
from flexfleet.pipeline.prepare import Resolved, unchanged


def model_pool(resolved: Resolved, pretrain: Path, out: Path) -> Path:
    """Write pool.json into `out`, and weights.safetensors if the rounds start from given weights. Raises PoolError if
    the targets cannot be reached, and what `Resolved.start` raises."""
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
    config: Config,
    algorithm: Algorithm,
    family: ModelFamily,
    made: Prepared,
    server: ServerContext,
    weights: Params,
) -> PoolFile:
    """Return pool.json, with the similarity of its pruning ratios to the reference's, if there is one. `weights` are
    those that the rounds start from; empty for fresh ones."""
    pool = coding.sized(pools.pool_of(algorithm, family, made, server), family, configs.codecs(config))
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
                name=m.name,
                params=m.params,
                share=m.share,
                flops=m.macs,
                bytes=m.bytes,
                widths={g: layout.width(m.spec, g) for g in groups},
                dispatched=m.dispatched,
                reported=m.reported,
                gamma=m.gamma,
                ratios=m.ratios,
                similarity=pools.similarity(m.ratios, reference[i].ratios) if reference else None,
                spec=m.spec.to_json(),
                ensemble=m.ensemble,
                static_bn=m.static_bn,
                codecs=None if m.codecs is None else sections_of(m.codecs),
                bytes_up=None if m.sizes is None else m.bytes_up,
                tiers={tier: None if codecs is None else sections_of(codecs) for tier, codecs in m.tiers},
            )
            for i, m in enumerate(pool)
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "", pretrain="pretrain")
    args = terminal.parsed(p, argv)
    with unchanged(args) as resolved:
        written = model_pool(resolved, args.pretrain, args.out)
    terminal.show(str(written))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)

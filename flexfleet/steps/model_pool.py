"""Step 3: builds the pool of sub-models, from the APoZ scores or by the algorithm's own rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fl_engine.core import pool as pools
from fl_engine.core.contracts import Algorithm, ModelFamily
from flexfleet.config import Config
from flexfleet.files import terminal as common
from flexfleet.files.artifacts import Apoz, Level, PoolFile
from flexfleet.steps.prepare import Resolved, resolved_of


def model_pool(resolved: Resolved, pretrain: Path, out: Path) -> Path:
    """Writes pool.json into `out`. Raises PoolError if the targets cannot be reached."""
    apoz = Apoz.read(pretrain / "apoz.json")
    return build(resolved.config, resolved.algorithm, resolved.family, apoz).write(out / "pool.json")


def build(config: Config, algorithm: Algorithm, family: ModelFamily, apoz: Apoz) -> PoolFile:
    """The pool, and how similar its pruning ratios are to those of the reference, if there is one."""
    pool = algorithm.pool(family, tuple(layer.apoz for layer in apoz.layers))
    reference = algorithm.pool(family, apoz.reference) if apoz.reference else None
    groups = [p.group for p in family.prunable()]
    layout = family.layout()
    return PoolFile(
        algorithm=config.algorithm["name"],
        model=config.model["name"],
        input_chw=family.input_shape,
        classes=family.outputs,
        groups={g: layout.groups[g] for g in groups},
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
            )
            for i, m in enumerate(pool)
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = common.step_parser(__doc__ or "", pretrain="pretrain")
    args = p.parse_args(argv)
    print(model_pool(resolved_of(args), args.pretrain, args.out))
    return 0


if __name__ == "__main__":
    common.run_main(main)

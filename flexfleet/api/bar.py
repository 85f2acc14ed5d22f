"""The bar that a notebook shows while a run computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flexfleet.tracking.console import brief


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


class Bar:
    """A tracker: how many rounds are committed, the last one's figures, and the time that is left."""

    def __init__(self) -> None:
        self._bar: Any = None

    def params(self, values: Mapping[str, Any]) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=int(values["rounds.stop"]), unit="round", file=sys.stderr)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        if rows:
            number, values = rows[-1]
            self._bar.set_postfix_str(brief(values), refresh=False)
            self._bar.update(number - self._bar.n)

    def finish(self, status: str) -> None:
        if self._bar is not None:
            if status == "FINISHED":
                self._bar.total = self._bar.n  # fewer than rounds.stop where the simulated clock ended the run
            self._bar.close()

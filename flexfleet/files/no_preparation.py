"""The files of the pre-training step for an algorithm without preparations. Writing them needs no torch, whose import
takes two seconds of CPU time."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "apoz.json": '{\n "schema_version": 1,\n "layers": [],\n "reference": null,\n "proxy_samples": 0,\n '
    '"proxy_accuracy": null,\n "seconds": 0.0\n}\n',
    "prepared.json": '{\n "schema_version": 1,\n "made": {}\n}\n',
}
"""The same as those of `steps.pretrain`, by name."""


def write(out: Path) -> None:
    """Write the files into the new folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (out / name).write_text(text, encoding="utf-8")

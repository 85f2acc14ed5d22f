"""Says which build of torch `make setup` installed. PyPI's for Linux includes CUDA: 3 GB that only a GPU needs."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
WITH_IT = re.compile(r"nvidia-.*|cuda-.*|triton")
"""Names of the packages that a build for GPUs requires."""


def told(version: str, kind: str | None, size: int) -> str:
    """One line on the build. `kind`: e.g. "CUDA 13.0"; None: a build for the CPU. `size` in bytes."""
    head = f"torch {version}, the build for {kind or 'the CPU'}, takes {size / 1e9:.1f} GB on disk"
    if kind is None:
        return f"{head}. For a GPU: remove .venv, then run make setup without PyTorch's CPU index (PIP_EXTRA_INDEX_URL)"
    return (
        f"{head}. Without a GPU, the build for the CPU is enough: remove .venv, then run "
        f"PIP_EXTRA_INDEX_URL={CPU_INDEX} make setup"
    )


def size_of(package: str) -> int:
    """Bytes on disk of an installed package and of its requirements whose names match WITH_IT, directly or not."""
    total, seen, left = 0, set[str](), [package]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # required on another platform
            continue
        paths = [Path(str(file.locate())) for file in installed.files or ()]
        total += sum(path.stat().st_size for path in paths if path.is_file())
        wanted = (re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0].lower() for text in installed.requires or ())
        left += [name for name in wanted if WITH_IT.fullmatch(name)]
    return total


def main() -> None:
    import torch

    hip = getattr(torch.version, "hip", None)
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else None
    print(told(torch.__version__, kind, size_of("torch")))


if __name__ == "__main__":
    main()

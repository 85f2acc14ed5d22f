"""All data sets. A new one is a file with `load` (and `fetch`) and a line in `DATASETS`.

`fl_engine.testing.datasets.DatasetSuite` then checks it. A data set of your own is a `Source` in any module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.core.registry import resolve
from fl_engine.core.samples import Data
from fl_engine.data.files import absent, data_root
from fl_engine.data.transforms import fingerprint, pad, subset
from fl_engine.datasets import (
    aep,
    casas,
    cifar10,
    cifar100,
    digits,
    emnist,
    epic_sounds,
    fashion_mnist,
    femnist,
    femnist_tff,
    mnist,
    shakespeare,
    stackoverflow_tff,
    tiny_imagenet,
    uthar,
    visdrone,
    widar,
    wisdm,
)

__all__ = ["DATASETS", "Source", "data_root", "fingerprint", "pad", "source_of", "subset"]


@dataclass(frozen=True)
class Source:
    """How to get a data set. Paths are relative to the data root, which is the functions' argument."""

    about: str
    """One line for lists: name, shape, classes or target, and samples; licence; size of the download."""

    load: Callable[[Path], Data]
    """Reads the files, never the network. Raises DataError, which says what to do, if they are missing or damaged."""

    fetch: Callable[[Path], None] | None = None
    """Downloads what is missing. None if a package contains the data, or if users have to download them. Raises
    DataError for damaged files, EnvironmentFailure if the network fails or nothing can be written."""

    files: tuple[str, ...] = ()
    """The files that `load` reads. A name with a `*` stands for one file or more."""

    address: str = ""
    """The URL of the data; empty if they are not published."""

    def missing(self, root: Path) -> tuple[Path, ...]:
        """Return the files that do not exist; empty if `load` can start."""
        return absent(root, self.files)

    def on_disk(self, root: Path) -> str:
        """Return `there`, `missing`, or how many of the files exist."""
        there = len(self.files) - len(self.missing(root))
        if there == len(self.files):
            return "there"
        return f"{there} of {len(self.files)} files" if there else "missing"


def _downloaded(module: Any, address: str) -> Source:
    return Source(module.ABOUT, module.load, module.fetch, module.FILES, address)


def _by_hand(module: Any) -> Source:
    return Source(module.ABOUT, module.load, files=module.FILES, address=module.URL)


def _emnist(split: emnist.Split) -> Source:
    load, fetch = partial(emnist.load, split=split), partial(emnist.fetch, split=split)
    return Source(split.about, load, fetch, split.files, emnist.ARCHIVE.url)


def _wisdm(device: str, code_key: bool = False) -> Source:
    load = partial(wisdm.load, device=device, code_key=code_key)
    return Source(wisdm.about(device, code_key), load, files=wisdm.files(device), address=wisdm.URL)


DATASETS: dict[str, Source] = {
    "digits": Source(digits.ABOUT, digits.load, address=digits.URL),
    "fashion_mnist": _downloaded(fashion_mnist, fashion_mnist.URL),
    "cifar10": _downloaded(cifar10, cifar10.ARCHIVE.url),
    "cifar100": _downloaded(cifar100, cifar100.ARCHIVE.url),
    "emnist": _emnist(emnist.BALANCED),
    "emnist_byclass": _emnist(emnist.BYCLASS),
    "epic_sounds": _by_hand(epic_sounds),
    "femnist": _by_hand(femnist),
    "femnist_tff": _downloaded(femnist_tff, femnist_tff.ARCHIVE.url),
    "mnist": _downloaded(mnist, mnist.URL),
    "shakespeare": _downloaded(shakespeare, shakespeare.REMOTE.url),
    "shakespeare_text": Source(
        shakespeare.ABOUT_TEXT, shakespeare.load_text, shakespeare.fetch, shakespeare.FILES, shakespeare.REMOTE.url
    ),
    "stackoverflow_tff": _downloaded(stackoverflow_tff, stackoverflow_tff.ARCHIVE.url),
    "tiny_imagenet": _downloaded(tiny_imagenet, tiny_imagenet.ARCHIVE.url),
    "aep": _by_hand(aep),
    "casas": _by_hand(casas),
    "uthar": _by_hand(uthar),
    "uthar_antennas": Source(
        uthar.ABOUT_ANTENNAS, partial(uthar.load, antennas=True), files=uthar.FILES, address=uthar.URL
    ),
    "visdrone": _by_hand(visdrone),
    "widar": _by_hand(widar),
    "wisdm_watch": _wisdm("watch"),
    "wisdm_watch_code": _wisdm("watch", code_key=True),
    "wisdm_phone": _wisdm("phone"),
    "wisdm_phone_code": _wisdm("phone", code_key=True),
}


def source_of(name: str) -> Source:
    """Return the data set of this name, registered or `package.module:NAME`. Raises ConfigError if there is none."""
    source = resolve(DATASETS, name, "data set")
    if not isinstance(source, Source):
        raise ConfigError(f"dataset.name = {name!r} must be a Source, got {source!r}")
    return source

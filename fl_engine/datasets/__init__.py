"""Registry of all data sets. A data set is a module with `load` (and optionally `fetch`) and an entry in `DATASETS`.

`fl_engine.testing.datasets.DatasetSuite` tests a data set. To use a data set outside of this package, define a `Source`
object in any module.
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
    cifar,
    digits,
    epic_sounds,
    femnist,
    mnist,
    shakespeare,
    tff,
    tiny_imagenet,
    uci_har,
    uthar,
    visdrone,
    widar,
    wisdm,
)

__all__ = ["DATASETS", "Source", "data_root", "fingerprint", "pad", "source_of", "subset"]


@dataclass(frozen=True)
class Source:
    """Describes how to load a data set. All paths are relative to the data root, which is passed to `load` and
    `fetch`."""

    about: str
    """One-line description: name, shape, classes or target, numbers of samples, licence, size of the download."""
    load: Callable[[Path], Data]
    """Function that reads the files without using the network. Raises DataError if the files are missing or damaged."""
    fetch: Callable[[Path], None] | None = None
    """Function that downloads missing files; None if a package contains the data, or if users must download the files.
    Raises DataError if a file is damaged, and EnvironmentFailure if the network fails or a file cannot be written."""
    files: tuple[str, ...] = ()
    """Names of the files that `load` reads. A name with a `*` must match at least one file."""
    address: str = ""
    """URL of the data; empty if the data are not published."""

    def missing(self, root: Path) -> tuple[Path, ...]:
        """Return the paths of files that do not exist."""
        return absent(root, self.files)

    def on_disk(self, root: Path) -> str:
        """Return `there`, `missing`, or a message with the number of existing files."""
        there = len(self.files) - len(self.missing(root))
        if there == len(self.files):
            return "there"
        return f"{there} of {len(self.files)} files" if there else "missing"


def _of(module: Any) -> Source:
    return Source(module.ABOUT, module.load, getattr(module, "fetch", None), module.FILES, module.URL)


def _images(each: mnist.IdxSet | cifar.CifarSet) -> Source:
    return Source(each.about, each.load, each.fetch, each.files, each.url)


def _wisdm(device: str) -> Source:
    return Source(wisdm.about(device), partial(wisdm.load, device=device), files=wisdm.files(device), address=wisdm.URL)


DATASETS: dict[str, Source] = {
    "digits": Source(digits.ABOUT, digits.load, address=digits.URL),
    "fashion_mnist": _images(mnist.FASHION_MNIST),
    "cifar10": _images(cifar.CIFAR10),
    "cifar100": _images(cifar.CIFAR100),
    "emnist": _images(mnist.EMNIST_BALANCED),
    "emnist_byclass": _images(mnist.EMNIST_BYCLASS),
    "epic_sounds": _of(epic_sounds),
    "femnist": _of(femnist),
    "femnist_tff": Source(tff.ABOUT_FEMNIST, tff.load_femnist, tff.fetch_femnist, tff.FEMNIST_FILES, tff.FEMNIST.url),
    "mnist": _images(mnist.MNIST),
    "shakespeare": _of(shakespeare),
    "shakespeare_text": Source(
        shakespeare.ABOUT_TEXT, shakespeare.load_text, shakespeare.fetch, shakespeare.FILES, shakespeare.URL
    ),
    "stackoverflow_tff": Source(
        tff.ABOUT_STACKOVERFLOW,
        tff.load_stackoverflow,
        tff.fetch_stackoverflow,
        tff.STACKOVERFLOW_FILES,
        tff.STACKOVERFLOW.url,
    ),
    "tiny_imagenet": _of(tiny_imagenet),
    "aep": _of(aep),
    "casas": _of(casas),
    "uci_har": _of(uci_har),
    "uthar": _of(uthar),
    "visdrone": _of(visdrone),
    "widar": _of(widar),
    "wisdm_watch": _wisdm("watch"),
    "wisdm_phone": _wisdm("phone"),
}


def source_of(name: str) -> Source:
    """Return the data set for a registered name or for an import path `package.module:NAME`. Raises ConfigError if the
    name is unknown."""
    source = resolve(DATASETS, name, "data set")
    if not isinstance(source, Source):
        raise ConfigError(f"dataset.name = {name!r} must refer to a fl_engine.datasets.Source, got {source!r}")
    return source

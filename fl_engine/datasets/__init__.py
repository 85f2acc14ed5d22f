"""All data sets. A new one is a file with `load` (and `fetch`) and a line in `DATASETS`.

`tests/conformance/test_datasets.py` then checks it with `fl_engine.testing.datasets.DatasetSuite`. A data set of your
own is a `Source`, too, and may be in any module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    """Reads the files, never the network. Raises DataError if they are missing or damaged; it says what to do."""

    fetch: Callable[[Path], None] | None = None
    """Downloads what is missing. None if a package contains the data, or if the download needs a form or a program of
    the publisher's; then `load` says what to do. Raises DataError for what is damaged, EnvironmentFailure where the
    network fails or nothing can be written."""

    files: tuple[str, ...] = ()
    """The files that `load` reads; a name with a `*` stands for one file or more."""

    address: str = ""
    """Where the data come from: a URL, or empty if they are not published."""

    def missing(self, root: Path) -> tuple[Path, ...]:
        """The files that do not exist; empty if `load` can start."""
        return absent(root, self.files)

    def on_disk(self, root: Path) -> str:
        """`there`, `missing`, or how many of the files are there."""
        there = len(self.files) - len(self.missing(root))
        if there == len(self.files):
            return "there"
        return f"{there} of {len(self.files)} files" if there else "missing"


DATASETS: dict[str, Source] = {
    "digits": Source(digits.ABOUT, digits.load, address=digits.URL),
    "fashion_mnist": Source(
        fashion_mnist.ABOUT, fashion_mnist.load, fashion_mnist.fetch, fashion_mnist.FILES, fashion_mnist.URL
    ),
    "cifar10": Source(cifar10.ABOUT, cifar10.load, cifar10.fetch, cifar10.FILES, cifar10.ARCHIVE.url),
    "cifar100": Source(cifar100.ABOUT, cifar100.load, cifar100.fetch, cifar100.FILES, cifar100.ARCHIVE.url),
    "emnist": Source(emnist.BALANCED.about, emnist.load, emnist.fetch, emnist.BALANCED.files, emnist.ARCHIVE.url),
    "emnist_byclass": Source(
        emnist.BYCLASS.about, emnist.load_byclass, emnist.fetch_byclass, emnist.BYCLASS.files, emnist.ARCHIVE.url
    ),
    "epic_sounds": Source(epic_sounds.ABOUT, epic_sounds.load, files=epic_sounds.FILES, address=epic_sounds.URL),
    "femnist": Source(femnist.ABOUT, femnist.load, files=femnist.FILES, address=femnist.URL),
    "femnist_tff": Source(
        femnist_tff.ABOUT, femnist_tff.load, femnist_tff.fetch, femnist_tff.FILES, femnist_tff.ARCHIVE.url
    ),
    "mnist": Source(mnist.ABOUT, mnist.load, mnist.fetch, mnist.FILES, mnist.URL),
    "shakespeare": Source(
        shakespeare.ABOUT, shakespeare.load, shakespeare.fetch, (shakespeare.FILE,), shakespeare.REMOTE.url
    ),
    "shakespeare_text": Source(
        shakespeare.ABOUT_TEXT, shakespeare.load_text, shakespeare.fetch, (shakespeare.FILE,), shakespeare.REMOTE.url
    ),
    "stackoverflow_tff": Source(
        stackoverflow_tff.ABOUT,
        stackoverflow_tff.load,
        stackoverflow_tff.fetch,
        stackoverflow_tff.FILES,
        stackoverflow_tff.ARCHIVE.url,
    ),
    "tiny_imagenet": Source(
        tiny_imagenet.ABOUT, tiny_imagenet.load, tiny_imagenet.fetch, tiny_imagenet.FILES, tiny_imagenet.ARCHIVE.url
    ),
    "aep": Source(aep.ABOUT, aep.load, files=aep.FILES, address=aep.URL),
    "casas": Source(casas.ABOUT, casas.load, files=casas.FILES, address=casas.URL),
    "uthar": Source(uthar.ABOUT, uthar.load, files=uthar.FILES, address=uthar.URL),
    "uthar_antennas": Source(
        uthar.ABOUT_ANTENNAS, partial(uthar.load, antennas=True), files=uthar.FILES, address=uthar.URL
    ),
    "visdrone": Source(visdrone.ABOUT, visdrone.load, files=visdrone.FILES, address=visdrone.URL),
    "widar": Source(widar.ABOUT, widar.load, files=widar.FILES, address=widar.URL),
    "wisdm_watch": Source(
        wisdm.about("watch"), partial(wisdm.load, device="watch"), files=wisdm.files("watch"), address=wisdm.URL
    ),
    "wisdm_watch_code": Source(
        wisdm.about("watch", True),
        partial(wisdm.load, device="watch", code_key=True),
        files=wisdm.files("watch"),
        address=wisdm.URL,
    ),
    "wisdm_phone": Source(
        wisdm.about("phone"), partial(wisdm.load, device="phone"), files=wisdm.files("phone"), address=wisdm.URL
    ),
    "wisdm_phone_code": Source(
        wisdm.about("phone", True),
        partial(wisdm.load, device="phone", code_key=True),
        files=wisdm.files("phone"),
        address=wisdm.URL,
    ),
}


def source_of(name: str) -> Source:
    """Return the data set of this name, registered or `package.module:NAME`. Raises ConfigError if there is none."""
    source = resolve(DATASETS, name, "data set")
    if not isinstance(source, Source):
        raise ConfigError(f"dataset.name = {name!r} is {source!r}; a Source is expected")
    return source

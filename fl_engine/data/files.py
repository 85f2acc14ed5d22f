"""Helpers for all data sets: find, check, download and parse files; pad images, take subsets, compute fingerprints.

Loading never touches the network and downloading never overwrites: an existing but wrong file is an error, because only
its owner knows whether it may be deleted.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import io
import logging
import lzma
import math
import os
import re
import secrets
import shutil
import stat
import struct
import tarfile
import time
import urllib.request
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import boxes, seeds
from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data, has_boxes
from fl_engine.core.system import hashed

DEFAULT_ROOT = "~/.cache/flexfleet/data"
CHUNK = 1 << 20
LARGEST_SIDE = 1024
"""The largest side of a padded image, in pixels."""
COUNTED = 4096
"""How many images' bytes are counted at a time."""
ABANDONED_S = 86_400
"""Seconds after which what is not finished is that of a process that was killed."""
PART = re.compile(r"(.+)\.[0-9a-f]{8}\.part(\.[0-9]+\.old)?", re.DOTALL)
"""A name of `part_of`, or what `packs` moves out of its way."""
MOST_NAMED = 10
"""Missing files that an error lists by name."""
SMALL = 1e-3
"""Standard deviations below it have fewer than four digits in six decimals."""
EQUAL = 1e-6
"""A deviation of less than this share of the mean is some steps of float32."""

log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------- finding and checking
def data_root(argument: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the argument, else the variable FLEXFLEET_DATA, else ~/.cache/flexfleet/data. Raises
    DataError for the home folder (~name) of a user that does not exist."""
    root = Path(argument or os.environ.get("FLEXFLEET_DATA") or DEFAULT_ROOT)
    try:
        return root.expanduser()
    except RuntimeError as error:
        raise DataError(f"the data root {root} is of an unknown user's home ({error}); give a folder") from error


def absent(root: Path, files: Sequence[str]) -> tuple[Path, ...]:
    """Those of `files` (relative to `root`) that do not exist; a name with a `*` is absent if no file matches it."""
    return tuple(root / file for file in files if not any(path.is_file() for path in root.glob(file)))


def require(name: str, root: Path, files: Sequence[str], url: str) -> None:
    """Raises DataError unless all `files` (relative to `root`) exist."""
    require_by_hand(name, root, files, f"Run `flexfleet fetch {name}`, or download {url} and put the files there")


def require_by_hand(name: str, root: Path, files: Sequence[str], how: str) -> None:
    """As `require`, for a data set that its user downloads: `how` says what, from where, how much, and where to put
    it."""
    if missing := absent(root, files):
        more = [f"{len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else []
        raise DataError(
            f"{name}: {len(missing)} of {len(files)} files are not there; expected "
            f"{', '.join([*map(str, missing[:MOST_NAMED]), *more])}. "
            f"{how}, or set the data root (FLEXFLEET_DATA) to the folder that holds {Path(files[0]).parts[0]}/"
        )


def warn_of_other_counts(data: Data, train: int, test: int) -> None:
    """For a data set whose publisher prints no checksums: says that there are other numbers of samples than these."""
    found = len(data.train_y), len(data.test_y)
    if found != (train, test):
        log.warning(
            "%s: %d training and %d test samples are there, %d and %d were published: files are missing, or of another "
            "version, so the split is another one too", data.name, *found, train, test,
        )  # fmt: skip


def read(path: Path, checksum: str | None = None, most: int | None = None) -> bytes:
    """The content of a file, which must match `checksum` (`md5:...`, `sha1:...`) if one is given.

    Raises DataError for what is no file, such as a pipe, which might be waited for without end, and for a file that
    cannot be read, has more than `most` bytes or does not match its checksum.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # of a folder reading says it
            raise DataError(f"{path}: expected a file, found a pipe, a socket or a device")
        if most is not None and (size := about.st_size) > most:
            raise DataError(f"{path}: expected at most {most} bytes, found {size}; is it another file?")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check that it is a file and who may read it") from error
    if checksum is not None:
        algorithm, expected = checksum.split(":")
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DataError(
                f"{path}: expected {algorithm} {expected}, found {found} ({len(content)} bytes); "
                "the file is damaged or another version: delete it and fetch again"
            )
    return content


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object for `json.loads`. Raises ValueError where it has a name twice, of which `json` would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0][:80]!r} is there twice")
    return found


def digest(path: Path) -> str:
    """The SHA-256 (hex) of a file, read in pieces. Raises DataError if it cannot be read."""
    try:
        return hashed(path, hashlib.sha256()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check that it is a file and who may read it") from error


# ------------------------------------------------------------------------------------------------ downloading
@dataclass(frozen=True)
class Remote:
    """A file to download: its official address, its local name, and its checksum as `algorithm:hex`."""

    url: str
    filename: str
    checksum: str


def part_of(path: Path) -> Path:
    """Where to write what then gets the name `path`: a name of its own for each thread of each machine."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def sweep(paths: Iterable[Path]) -> None:
    """Removes parts of these files and folders that killed processes have left: one may be as large as a data set."""
    wanted = set(paths)
    for folder in {path.parent for path in wanted}:
        for part in folder.glob("*.part*"):
            named = PART.fullmatch(part.name)
            if named is None or folder / named[1] not in wanted:
                continue
            with suppress(OSError):  # another process does the same
                if part.lstat().st_mtime < time.time() - ABANDONED_S:
                    remove(part)


def remove(path: Path) -> None:
    """A file, a folder or a link. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of a write that fails, not of what is read for it: a network or an archive."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `path` unless an error is raised, so that `path` is never half written.
    Raises EnvironmentFailure, which names `path`, where nothing can be written there, or the disk takes no more."""
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            yield out
        part.replace(path)
    except OSError as error:
        if error.filename is None and error.errno not in OF_DISKS:  # that of a write names no file
            raise
        why = f"{path}: cannot be written ({error}); make room, or see who may write there"
        raise EnvironmentFailure(why) from error
    finally:
        with suppress(OSError):  # there is none, or no folder that could hold it
            part.unlink()


def download(remote: Remote, folder: Path, timeout_s: float = 60.0) -> Path:
    """Downloads one file unless it exists and is right. Logs progress in steps of a tenth.

    Raises DataError if the content does not match the checksum, EnvironmentFailure if the network fails or it cannot be
    written; then nothing is kept.
    """
    target = folder / remote.filename
    if target.exists():
        read(target, remote.checksum)
        return target
    sweep([target])
    algorithm, expected = remote.checksum.split(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with urllib.request.urlopen(remote.url, timeout=timeout_s) as response, replacing(target) as out:
            said = response.headers.get("Content-Length") or ""
            total = int(said) if said.isdecimal() else 0
            done = 0
            while chunk := response.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)
                _report(remote.filename, done, done + len(chunk), total)
                done += len(chunk)
            if done < total:
                raise ConnectionError(f"the connection ended after {done} of {total} bytes")
            if digest.hexdigest() != expected:
                raise DataError(
                    f"{remote.url}: expected {algorithm} {expected}, found {digest.hexdigest()} ({done} bytes); "
                    f"nothing was kept: fetch again, or put the right file at {target}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise EnvironmentFailure(
            f"{remote.url}: download failed ({error}); check the network, "
            f"or download it elsewhere and put it at {target}"
        ) from error
    return target


def _report(filename: str, before: int, after: int, total: int) -> None:
    if total and before * 10 // total != after * 10 // total:
        log.info("%s: %d %% of %.1f MB", filename, after * 100 // total, total / 1e6)


DAMAGE = (
    KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError,
    RuntimeError, struct.error, MemoryError,
)  # fmt: skip
"""The errors that readers raise for a damaged archive; MemoryError if a header declares a dictionary of gigabytes."""


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Writes the named members of a tar or zip file (told apart by the file's suffix) to the given paths.

    Other members are ignored and no path is taken from the archive, so no archive can write elsewhere. Raises DataError
    for an archive that is broken or has no such member, EnvironmentFailure if one cannot be written.
    """
    sweep(members.values())
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                for name, target in members.items():
                    with packed.open(name) as content, replacing(target) as out:
                        shutil.copyfileobj(content, out, CHUNK)
            return
        with tarfile.open(archive) as tar:
            for name, target in members.items():
                member = tar.getmember(name)
                source = tar.extractfile(member) if member.isreg() else None
                if source is None:
                    raise DataError(f"{archive}: {name} is not a plain file; delete the archive and fetch again")
                with source, replacing(target) as out:
                    shutil.copyfileobj(source, out, CHUNK)
    except DAMAGE as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}); delete the archive and fetch again") from error


# ---------------------------------------------------------------------------------------------------- parsing
def gunzip(path: Path, content: bytes, most: int) -> bytes:
    """Unpacks `content`, that of a gzip file. The declared size is not trusted: at most `most` + 1 bytes are unpacked,
    and the format's parser refuses what is too long. Raises DataError, which names `path`."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            return file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a gzip file ({error}); delete it and fetch again") from error


def parse_idx(path: Path, content: bytes, axes: int) -> NDArray[np.uint8]:
    """An idx file of unsigned bytes (format: http://yann.lecun.com/exdb/mnist) with `axes` axes.

    Bytes 0-1 are zero, byte 2 is 8 (unsigned byte), byte 3 the number of axes; then one big-endian uint32 for each
    axis; then the values. Raises DataError for another magic number, no values, or a length that contradicts the
    header.
    """
    magic = bytes((0, 0, 8, axes))
    if content[:4] != magic:
        raise DataError(
            f"{path}: expected the idx magic number 0x{magic.hex()} (unsigned bytes, {axes} axes), "
            f"found 0x{content[:4].hex()}; is it another file?"
        )
    start = 4 + 4 * axes
    if len(content) < start:
        raise DataError(f"{path}: expected an idx header of {start} bytes, found {len(content)} bytes; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    expected = start + math.prod(shape)
    if expected == start:
        raise DataError(f"{path}: the header says {' x '.join(map(str, shape))}, which is no values; fetch it again")
    if len(content) != expected:
        raise DataError(
            f"{path}: the header says {' x '.join(map(str, shape))} values, so {expected} bytes; "
            f"found {len(content)}: truncated or damaged, delete it and fetch again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def parse_records(
    path: Path, content: bytes, records: int, chw: tuple[int, int, int], label_bytes: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (N, C, H, W) and labels (N,) of a CIFAR binary file. A record is its label bytes, of which the last one,
    the finest label, is used, then the colour planes.

    Raises DataError unless the file has exactly `records` records.
    """
    size = label_bytes + chw[0] * chw[1] * chw[2]
    if len(content) != records * size:
        raise DataError(
            f"{path}: expected {records} records of {size} bytes = {records * size} bytes, found "
            f"{len(content)}: truncated or damaged, delete it and fetch again"
        )
    table = np.frombuffer(content, dtype=np.uint8).reshape(records, size)
    return table[:, label_bytes:].reshape(records, *chw), table[:, label_bytes - 1]


def check_labels(path: Path, labels: NDArray[np.uint8], classes: int) -> None:
    """Raises DataError for a label outside 0 .. classes - 1."""
    wrong = np.flatnonzero(labels >= classes)
    if wrong.size:
        raise DataError(
            f"{path}: expected labels 0..{classes - 1}, found {labels[wrong[0]]} at sample {wrong[0]} "
            f"({wrong.size} such samples); the file is damaged, delete it and fetch again"
        )


def byte_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images (N, C, H, W), in units of 255, to four decimals.

    For data sets whose authors publish none. They are computed from sums of integers, so all machines agree; a constant
    channel gets the deviation 1.
    """
    mean, std = [], []
    for channel in range(images.shape[1]):
        # Some images at a time, because `bincount` converts its input to 8-byte integers.
        counts = np.zeros(256, dtype=np.int64)
        for at in range(0, len(images), COUNTED):
            counts += np.bincount(images[at : at + COUNTED, channel].ravel(), minlength=256)
        number, values = int(counts.sum()), range(256)
        total = sum(value * int(count) for value, count in zip(values, counts, strict=True))
        squares = sum(value * value * int(count) for value, count in zip(values, counts, strict=True))
        deviation = math.sqrt(number * squares - total * total) / number / 255
        mean.append(round(total / number / 255, 4))
        std.append(round(deviation, 4) or 1.0)
    return tuple(mean), tuple(std)


# ----------------------------------------------------------------------------------------- splits and moments
def random_split(samples: int, test_share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ascending positions of the training and the test part, for a data set that is published without a split.

    The test part is the one that scikit-learn's `train_test_split(test_size=test_share, random_state=42)` draws, which
    is how published code often splits. It uses NumPy's legacy generator, whose stream is guaranteed never to change.
    """
    drawn = np.random.RandomState(42).permutation(samples).astype(np.int64)
    test = math.ceil(test_share * samples)
    return np.sort(drawn[test:]), np.sort(drawn[:test])


def moments(x: NDArray[np.float32], axis: int = -1) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per entry of `axis`, rounded so that all machines agree: to six decimals, and where
    the deviation is below SMALL, both to its sixth digit. A deviation below 5e-7 that is no more than what rounding
    to float32 makes of equal values is 0."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean, std = x.mean(others, dtype=np.float64), x.std(others, dtype=np.float64)
    pairs = [_rounded(float(m), float(s)) for m, s in zip(mean, std, strict=True)]
    return tuple(m for m, _ in pairs), tuple(s for _, s in pairs)


def _rounded(mean: float, std: float) -> tuple[float, float]:
    if min(5e-7, EQUAL * abs(mean)) < std < SMALL:
        decimals = 5 - math.floor(math.log10(std))
        return round(mean, decimals) + 0.0, round(std, decimals)
    return float(np.round(mean, 6)) + 0.0, float(np.round(std, 6))  # + 0.0: no negative zero


# ------------------------------------------------------------------------------ padding, subsets, fingerprint
def pad(data: Data, side: int) -> Data:
    """Centres all images on black squares of side x side; if a margin is odd, the larger half is right or below.
    Targets that are boxes stay around what they are about.

    For networks that need larger images (`TakesImages.min_hw`). Raises DataError for images larger than `side`, for a
    side above LARGEST_SIDE, and for samples that are not images.
    """
    if not data.has_images:
        raise DataError(f"{data.name} holds no images, and only images can be padded: set dataset.pad=none")
    _, height, width = data.input_shape
    down, right = side - height, side - width
    if down < 0 or right < 0 or side > LARGEST_SIDE:
        raise DataError(
            f"{data.name}: images of {height} x {width} cannot be padded to {side} x {side} "
            f"(at most {LARGEST_SIDE} x {LARGEST_SIDE})"
        )
    margins = (right // 2, right - right // 2, down // 2, down - down // 2)
    train_x, test_x = (torch.nn.functional.pad(x, margins) for x in (data.train_x, data.test_x))
    train_y, test_y = data.train_y, data.test_y
    if has_boxes(data.task):
        shares = torch.tensor([[width, 0, right // 2], [0, height, down // 2]], dtype=torch.float64) / side
        train_y, test_y = (boxes.moved(y.double(), shares.expand(len(y), 2, 3)).to(y) for y in (train_y, test_y))
    return replace(data, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def stratified(labels: NDArray[np.int64], samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`samples` ascending positions, drawn without replacement, with the classes in the same shares as in the whole.

    Shares are rounded by largest remainder (ties: the lower label), in integers, so all machines agree. A class with
    fewer than about n / samples members may get none.
    """
    values, counts = np.unique(labels, return_counts=True)
    shares, remainders = np.divmod(counts * samples, len(labels))
    missing = samples - int(shares.sum())
    shares[np.argsort(-remainders, kind="stable")[:missing]] += 1
    chosen = [
        rng.permutation(np.flatnonzero(labels == value))[:share] for value, share in zip(values, shares, strict=True)
    ]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def subset(data: Data, train_samples: int | None, test_samples: int | None, seed: int) -> Data:
    """A smaller data set for quick runs: stratified by label, in the original order; None keeps a part whole. Without
    labels the samples are drawn uniformly.

    The result depends on the seed alone. Training and test part have separate random streams, so neither changes the
    other. Raises DataError if more samples are asked for than there are, or fewer than one.
    """
    train = _choose(data, "training", data.train_y, train_samples, seed)
    test = _choose(data, "test", data.test_y, test_samples, seed)
    return replace(
        data,
        train_x=data.train_x[train],
        train_y=data.train_y[train],
        test_x=data.test_x[test],
        test_y=data.test_y[test],
        natural_client=None if data.natural_client is None else data.natural_client[train],
    )


def _choose(data: Data, part: str, targets: torch.Tensor, samples: int | None, seed: int) -> slice | torch.Tensor:
    if samples is None:
        return slice(None)
    if not 1 <= samples <= len(targets):
        raise DataError(
            f"{data.name}: expected 1 to {len(targets)} {part} samples, got {samples}; leave the number out to take all"
        )
    labels = data.task.labels(targets) if data.task.label_count else np.zeros(len(targets), dtype=np.int64)
    return torch.from_numpy(stratified(labels, samples, seeds.rng(seed, f"subset/{part}")))


def fingerprint(data: Data) -> str:
    """SHA-256 (hex) over everything that a result depends on: shapes, types, bytes, task, normalisation.

    Equal data have equal fingerprints on every machine. Caches use it as a key; a partition names its data by it.
    """
    digest = hashlib.sha256(repr((data.task.identity, data.mean, data.std)).encode())
    for tensor in (data.train_x, data.train_y, data.test_x, data.test_y, data.natural_client):
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()

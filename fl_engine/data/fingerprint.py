"""By what data are known: a checksum of everything that a result depends on."""

from __future__ import annotations

import hashlib

from fl_engine.core.samples import Data


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

"""Store the secret key of a run, which only the run's coordinator can read.

The coordinator's signing keys (`manifest.key_of` for results, `chain.sign` for the run), and the noise and the client
sampling of a private run (`privacy`), are derived from a random key. The bucket of the run's ledger never contains the
key, because workers receive URLs for objects in this bucket.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.text import is_address
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.s3_settings import OWN, SIGNING, endpoint_of, setting
from fl_engine.storage.store import FolderStore, Store, sha256
from flexfleet.config import Config
from flexfleet.files.artifacts import RunFile

log = logging.getLogger("flexfleet")

SIZE = 32
"""Size of a key in bytes."""
IN_RUN = "secret/key"
"""Default path of the key in the run's folder."""
SETTINGS = "FLEXFLEET_SECRETS_"
"""Prefix of the environment variables that configure a bucket for keys."""


def address(store: Store, key: str = "") -> str:
    """Return the address of a key. If the key is stored in a file, the address includes the host name."""
    if not isinstance(store, FolderStore):
        return store.uri(key)
    return f"{store.root.resolve() / key} on {socket.gethostname()}"


def make_private(folder: Path) -> None:
    """Create a folder that only this user can read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


@dataclass(frozen=True)
class InStore:
    """Key that is stored in a file, or in an object outside the bucket of the run's ledger."""

    store: Store
    key: str

    def __str__(self) -> str:
        return address(self.store, self.key)

    def read(self) -> bytes | None:
        """Return the key. Return None if the key does not exist."""
        return self.store.get(self.key) if self.key in self.store.list(self.key) else None

    def create(self, value: bytes) -> None:
        """Store the key unless a key is already stored."""
        store = self.store
        if isinstance(store, FolderStore):
            make_private((store.root / self.key).parent)
            store = FolderStore(store.root, 0o600)
        store.create(self.key, value)


@dataclass(frozen=True)
class InSecret:
    """Key in a Kubernetes Secret. When the run has finished, the Secret is deleted unless the run is private."""

    cluster: Cluster
    run: str
    """Kubernetes label of the run."""

    @property
    def name(self) -> str:
        return f"{self.run}-keys"

    def __str__(self) -> str:
        return f"the Secret {self.cluster.namespace}/{self.name}"

    def read(self) -> bytes | None:
        secret = self.cluster.get("secrets", self.name)
        try:
            return None if secret is None else base64.b64decode(secret["data"]["key"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{self} must contain a run's key: {type(error).__name__} {error}") from None

    def create(self, value: bytes) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": self.name,
                "namespace": self.cluster.namespace,
                "labels": {jobs.RUN: self.run, "app.kubernetes.io/part-of": "flexfleet"},
            },
            "type": "Opaque",
            "immutable": True,
            "data": {"key": base64.b64encode(value).decode()},
        }
        self.cluster.create("secrets", body)

    def delete(self) -> None:
        self.cluster.delete("secrets", self.name)


Place = InStore | InSecret
"""Storage location of a key. The methods raise EnvironmentFailure if the location is not available."""


def place(config: Config, run_id: str, store: Store, out: Path) -> Place:
    """Return the location of a run's key. `store` contains the run's ledger, and `out` is the run's folder. Raises
    ConfigError if clients could receive URLs for the location."""
    where = config.run.secrets
    if where is None and config.run.backend == "kubernetes":
        return InSecret(Cluster(config.kubernetes.namespace), jobs.run_label(run_id, store.uri()))
    if where is None:
        return InStore(FolderStore(out.resolve()), IN_RUN)
    return InStore(shared_place(config, run_id), "key")


def shared_place(config: Config, name: str, hasty: bool = False) -> Store:
    """Return the store that contains the key `name`. If `hasty` is True, wait only a few seconds for the server.
    Raises ConfigError if clients could receive URLs for this store."""
    where = config.run.secrets
    if where is None:
        return FolderStore(Path(config.run.store).resolve() / name)
    check_folder(config)
    if not is_address(where):
        return FolderStore(Path(where).resolve() / name)
    bucket = S3Store(f"{where.rstrip('/')}/{name}", settings=SETTINGS, hasty=hasty)
    _check_bucket(where, config.run.remote)
    return bucket


def check_folder(config: Config) -> None:
    """Raise ConfigError if clients could read the folder that contains the keys. Only `shared_place` checks buckets,
    because pipeline tasks that do not execute rounds have no credentials for the bucket."""
    where, remote = config.run.secrets, config.run.remote
    if where is None or remote is None or "://" in where or "://" in remote:
        return
    if Path(where).resolve().is_relative_to(Path(remote).resolve()):
        message = f"run.secrets must not be in run.remote = {remote!r}, because clients read it, got {where!r}"
        raise ConfigError(message, path="run.secrets")


def _check_bucket(uri: str, remote: str | None) -> None:
    names = [f"{SETTINGS}{name}" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ConfigError.at(f"run.secrets = {uri!r} requires separate credentials. Set {' and '.join(missing)}")
    if os.environ[names[0]] in {setting("AWS_ACCESS_KEY_ID", whose) for whose in (OWN, SIGNING)}:
        raise ConfigError(f"{names[0]} must differ from the access keys of the coordinator and of the URL signer")
    buckets = [each.partition("://")[2].partition("/")[0] for each in (uri, remote or "")]
    servers = [(endpoint_of(settings) or "").rstrip("/") for settings in (SETTINGS, OWN)]
    if buckets[0] == buckets[1] and servers[0] == servers[1]:
        raise ConfigError.at(
            f"run.secrets must be in a different bucket from run.remote ({remote!r}), because clients get URLs for "
            f"that bucket, got {uri!r}"
        )


def key_of_run(place: Place, known: RunFile | None, private: bool) -> bytes:
    """Return the run's key. If the key does not exist, create it. A new key invalidates the assignments of an
    uncommitted round, so these assignments are sent again.

    A private run must keep its first key, because its noise is derived from this key. Raises IntegrityError if the key
    of a private run is missing or does not match the digest in the run's record `known`.
    """
    expected = None if known is None or not private else known.key_sha256
    key = place.read()
    if key is None and expected is None:
        place.create(secrets.token_bytes(SIZE))
        key = place.read()
        log.log(logging.INFO if private else logging.DEBUG, "the run's key is stored in %s", place)
    if key is None or len(key) != SIZE or expected not in (None, sha256(key)):
        raise IntegrityError(
            f"{place} must contain the key of this run. The key was originally stored in "
            f"{known.key_at if known else place}. Restore the key, or set run.secrets to the key's location"
        )
    return key

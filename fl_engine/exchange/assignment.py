"""What a client's pod is told in a JSON file, and a device in a letter's loan: which orders are its own, and how it
gets at them.

The file is a secret: it holds the keys that sign the answers, and URLs. Until a URL expires, whoever has it can read an
order or write an update. A second file beside it holds what all pods of a Job may read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fl_engine.core.errors import ConfigError, brief
from fl_engine.core.fields import Index
from fl_engine.data.local import FORM
from fl_engine.storage.places import open_store
from fl_engine.storage.store import Store
from fl_engine.storage.sums import Sum
from fl_engine.storage.urls import Upload, UrlStore
from fl_engine.training.memory import Peaks

SITE_FILES = ("run.json", "pool.json", "partition.json", "partition.safetensors")
"""Under `site/` in the run's store: what a client needs besides its orders and the data."""
OWN_SITE_FILES = ("run.json", "pool.json", FORM)
"""The same for a client whose data are its own: nothing of others."""
COMMON = "common.json"
"""The file beside an assignment: keys of the store to URLs, as in `reads`."""
URLS = TypeAdapter(dict[str, str])
VERSION: Literal[2] = 2
"""Since version 2 the memory that training takes is told level by level."""


def site_files(own: bool) -> tuple[str, ...]:
    """`own`: clients have data of their own (partition.rule=local)."""
    return OWN_SITE_FILES if own else SITE_FILES


class Assignment(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[2] = VERSION
    round: Index
    clients: tuple[Index, ...]
    evaluates: bool = False
    """The orders are those of the round's evaluation."""
    keys: dict[int, str]
    """By client, hexadecimal: what signs its answer."""
    site: dict[str, Sum] = {}
    """By name, the sum of each file under `site/`: whoever can write the store alone changes nothing in them."""
    orders: dict[int, Sum] = {}
    """By client, the sum of its order's file, which names those of the tensors."""
    device: str = "cpu"
    """Torch device."""
    observe: Literal["simulated", "cgroup"] = "simulated"
    memory: Peaks | None = None
    """For `cgroup`: bytes that a client takes before it trains, and at the peak of training each level of the pool."""
    failures: Index = 0
    """For `cgroup`: how many pods that held the order were killed. (A pod of a round is told by its Job.)"""
    require_numerics: bool = False
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The sha256 of the wheel with the run's own code, in the store (`exchange.code`)."""
    code_signature: str | None = None
    """By the coordinator, with the first client's key: that this wheel is the run's."""
    store: str | None = None
    """The run's store, for clients with credentials of their own; None: by URL."""
    reads: dict[str, str] = {}
    """Keys of the store to URLs."""
    writes: dict[str, Upload] = {}

    @model_validator(mode="after")
    def _a_key_for_each(self) -> Assignment:
        for client in self.clients:
            if not bytes.fromhex(self.keys.get(client, "")):
                raise ValueError(f"client {client} has no key to sign with")
        return self

    @staticmethod
    def read(path: Path) -> Assignment:
        """With what is common to its Job's pods. Raises ConfigError where a file is missing or is none."""
        common = path.with_name(COMMON)
        try:
            content = path.read_bytes()
            _check_version(path, content)
            told = Assignment.model_validate_json(content)
            reads = URLS.validate_json(common.read_bytes())
        except OSError as error:
            raise ConfigError(f"no assignment at {error.filename}: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}, with {COMMON} beside it, is no assignment: {brief(error)}") from error
        return told.model_copy(update={"reads": {**reads, **told.reads}})

    def open(self) -> Store:
        return open_store(self.store) if self.store else UrlStore(self.reads, self.writes)

    @property
    def lengths(self) -> dict[str, int]:
        """By key of the store, the only length in bytes at which it can be written; other keys are left out."""
        return {key: upload.size for key, upload in self.writes.items() if upload.verb == "PUT"}


def _check_version(path: Path, content: bytes) -> None:
    try:
        found = _OfAnyVersion.model_validate_json(content).schema_version
    except ValidationError:
        return  # the assignment's own check says what is wrong
    if found != VERSION:
        raise ConfigError(
            f"{path} is an assignment of version {found}, this client reads version {VERSION}: give the coordinator "
            "and the clients' image (kubernetes.image, kubernetes.pools.*.image) one version of flexfleet"
        )


class _OfAnyVersion(BaseModel):
    schema_version: int

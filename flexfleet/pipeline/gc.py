"""Delete entries that nothing keeps. An entry is a run, comparison or study in `run.store`, in `run.remote` or in both.

A deletion begins by renaming the entry's folder to `.gc-<name>` and deleting the commit markers in `run.remote`. After
a kill, each entry is therefore either complete or no longer a run, and the next call deletes the rest.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, InUse, nearest
from fl_engine.models.build import INIT
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.storage import run_lock
from fl_engine.storage.checkpoints import MARK
from fl_engine.storage.s3 import open_store
from flexfleet.config import Config
from flexfleet.files.run_folder import folder_lock
from flexfleet.pipeline.publish import CANDIDATE, CHAMPION
from flexfleet.pipeline.resume import place_of
from flexfleet.reports.precisions import EXPORT
from flexfleet.tracking import dvc_remote, server

log = logging.getLogger("flexfleet")

GONE = ".gc-"
DAYS = re.compile("([0-9]{1,5})d")
RECORDS = ("run.json", "central.json", "comparison.json", "tune.json", "regression.json")
KINDS = {"updates": "updates", "rounds": "ledger", "metrics": "ledger", EXPORT: "exports"}
"""Map names of folders to kinds of files. Earlier names take precedence."""


class Entry:
    """A run, comparison or study. `remote` is the address of its ledgers; None if `folder` contains them."""

    def __init__(self, folder: Path, remote: str | None) -> None:
        self.folder, self.remote = folder, None if remote is None else open_store(remote)
        stores = [open_store(str(folder)), *([] if self.remote is None else [self.remote])]
        self.sizes, self.changed = Counter[str](), 0.0
        self.records, self.texts = list[dict[str, Any]](), set[str]()
        for store in stores:
            for key, (size, changed) in store.sizes("").items():
                *folders, name = key.split("/")
                self.sizes[next((kind for part, kind in KINDS.items() if part in folders), "files")] += size
                if name != ".lock":  # which commands change that only read the run
                    self.changed = max(self.changed, changed)
                if name in RECORDS:
                    self.records.append(json.loads(store.get(key), object_hook=self._noted))
        self.runs = {record["run_id"] for record in self.records if "run_id" in record}
        self.parents = {record["forked"]["run_id"] for record in self.records if record.get("forked")}
        self.tracked = {str(record["mlflow_run_id"]) for record in self.records if record.get("mlflow_run_id")}
        self.pointers = {dvc_remote.checksum(path.read_text("utf-8")) for path in folder.rglob("dvc/*.dvc")}

    def _noted(self, value: dict[str, Any]) -> dict[str, Any]:
        """Store the texts that may name another entry, and return `value`."""
        texts = {key: text for key, text in value.items() if isinstance(text, str)}
        self.texts |= {text for key, text in texts.items() if "/" in text or key == INIT}
        return value

    def check_free(self) -> None:
        """Raise ConfigError or InUse if a process uses the entry."""
        for lock in self.folder.rglob(".lock"):
            with folder_lock(lock.parent):
                pass
        if self.remote is not None:
            for run in {key.partition("lease/")[0] for key in self.remote.list("") if "lease/" in key}:
                run_lock.check_free(open_store(self.remote.uri(run)))

    def begin_deletion(self) -> None:
        if self.folder.exists() and not self.folder.name.startswith(GONE):
            target = f"{GONE}{self.folder.name}-{secrets.token_hex(3)}"
            self.folder = self.folder.rename(self.folder.with_name(target))
        if self.remote is not None:
            keys = [key for key in self.remote.list("") if not key.endswith(RECORDS)]
            self.remote.delete(*(key for key in reversed(keys) if key.endswith(MARK)))
            self.remote.delete(*keys)

    def end_deletion(self) -> None:
        if self.remote is not None:
            self.remote.delete(*self.remote.list(""))
        if self.folder.exists():
            shutil.rmtree(self.folder)


def collect(config: Config, keep: str, dry_run: bool) -> dict[str, Any]:
    """Delete all entries that are not kept, and everything that belongs only to them. `keep` lists names of entries,
    aliases of registered models, and ages such as 30d. With `dry_run`, delete nothing. Keys in `run.secrets` stay,
    because runs in other stores may use them.

    Raises:
        ConfigError: `keep` contains an unknown word, or `publish.dvc` is not set.
        EnvironmentFailure: A store, MLflow, the DVC remote or the cluster is not available.
    """
    home, remote, dvc = Path(config.run.store), config.run.remote, config.publish.dvc
    cluster = Cluster(config.kubernetes.namespace) if config.run.backend == "kubernetes" else None
    # List the cluster's objects before the runs, because a new run writes its ledger before it creates objects.
    claims = cluster.select("configmaps", {"app.kubernetes.io/part-of": "flexfleet"}) if cluster else []
    ledgers = {key.partition("/")[0] for key in open_store(remote).list("")} if remote else set()
    names = {path.name for path in home.glob("*") if path.is_dir()} | ledgers
    found = {
        name: Entry(home / name, place_of(str(remote), name) if name in ledgers else None)
        for name in sorted(names)
        if not name.startswith(".") or name.startswith(GONE)
    }
    gone = {name: entry for name, entry in found.items() if name.startswith(GONE)}
    entries = {name: entry for name, entry in found.items() if entry.records and name not in gone}
    tracked = {run for entry in found.values() for run in entry.tracked}
    client = server.Client(config.tracking.mlflow) if tracked and config.tracking.mlflow else None
    aliases = {} if client is None else server.runs_by_alias(client, tracked)
    kept = _kept(entries, keep, home, aliases, dry_run)
    gone |= {name: entry for name, entry in entries.items() if name not in kept}
    pushed = {pointer for entry in gone.values() for pointer in entry.pointers}
    if pushed and dvc is None:
        raise ConfigError("publish.dvc must be the DVC remote that has the runs' files, got null", path="publish.dvc")
    parts = [(kind, name, size) for name, entry in gone.items() for kind, size in sorted(entry.sizes.items())]
    for entry in () if dry_run else gone.values():
        entry.begin_deletion()
    runs = sorted(tracked - {run for name in kept for run in entries[name].tracked})
    held = {pointer for name in kept for pointer in entries[name].pointers}
    if client is not None:
        held |= dvc_remote.pushed_by_others(client, runs) if pushed else set()
        for run in runs:
            parts.append(("mlflow", run, server.delete_run(client, run, dry_run)))
    if pushed and dvc is not None:
        parts.append(("dvc", dvc, dvc_remote.delete(pushed, held, dvc, dry_run)))
    if cluster is not None:
        place = place_of(remote or str(home.resolve()), "")
        stores = {claim["metadata"]["name"]: claim["data"]["store"] for claim in claims}
        paths = {label: store.removeprefix(place) for label, store in stores.items() if store.startswith(place)}
        ended = {label for label, path in paths.items() if path.partition("/")[0] not in found.keys() - gone.keys()}
        places = [str(record.get("key_at")) for entry in gone.values() for record in entry.records]
        named = {at.rpartition("/")[2] for at in places if at.startswith("the Secret ")}
        objects = [("configmaps", label) for label in ended]
        objects += [("secrets", name) for name in named | {f"{label}-keys" for label in ended}]
        for kind, name in sorted(each for each in objects if cluster.get(*each)):
            parts.append((kind, name, 0))
            if not dry_run:
                cluster.delete(kind, name)
    for entry in () if dry_run else gone.values():
        entry.end_deletion()
    rows = [{"kind": kind, "name": name, "bytes": size, "why": "nothing keeps it"} for kind, name, size in parts]
    return {"entries": rows, "kept": kept, "bytes": sum(size for _, _, size in parts), "dry_run": dry_run}


def _kept(
    entries: dict[str, Entry], keep: str, home: Path, aliases: dict[str, set[str]], dry_run: bool
) -> dict[str, str]:
    """Map the name of each kept entry to the reason. `aliases` maps aliases to MLflow runs (`server.runs_by_alias`)."""

    def named(word: str) -> set[str]:
        return {name for name, entry in entries.items() if name == word or entry.tracked & aliases.get(word, set())}

    words, known = [word.strip() for word in keep.split(",")], {*entries, *aliases}
    if wrong := [word for word in words if not DAYS.fullmatch(word) and word not in known]:
        text = (
            f"--keep must list names of runs, aliases of their registered models or ages such as 30d, got {wrong[0]!r}"
            f"{nearest(wrong[0], known)}"
        )
        if not dry_run or not {CANDIDATE, CHAMPION}.issuperset(wrong):  # other runs may be registered before a deletion
            raise ConfigError(text, path="keep")
        log.warning("a deletion would be refused: %s", text)
    days = max((int(found[1]) for found in map(DAYS.fullmatch, words) if found), default=0)
    kept = {name: word for word in words for name in named(word)}
    for name in sorted(entries.keys() - kept.keys()):
        try:
            if time.time() - entries[name].changed < days * 86_400:
                kept[name] = f"{days}d"
            else:
                entries[name].check_free()
        except (ConfigError, InUse) as error:
            log.warning("skipping %s: %s", name, error)
            kept[name] = "in use"
    queue = list(kept)
    for name in queue:
        needed = {other for other, entry in entries.items() if entry.runs & entries[name].parents}
        for text in entries[name].texts:
            parts = {os.path.relpath(base / text, home).partition("/")[0] for base in (Path(), home)}
            needed |= (parts & entries.keys()) | named(text)
        for other in sorted(needed - kept.keys()):
            kept[other] = f"{name} refers to it"
            queue.append(other)
    return kept

"""Checks that the run store, the MLflow server and the DVC remote of a configuration can be used. A pipeline's first
task makes these checks, and reports their faults together with those of the form."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fl_engine.core.errors import (
    ConfigError,
    EnvironmentFailure,
    FlexfleetError,
    Refused,
    Unreachable,
    first_line,
    masked,
    together,
)
from fl_engine.storage.s3 import check_place, open_store
from flexfleet.config.form_fields import no_passwords, place, platform_store, platform_uri
from flexfleet.config.schema import Config
from flexfleet.tracking import databases
from flexfleet.tracking.server import address, check_address, client_of

DEADLINE_S = 10.0
"""Seconds within which all places must have answered."""
ANSWER_S = 4.0
"""Seconds within which MLflow's server must answer one request."""
OTHER_LOGINS = tuple(
    f"MLFLOW_TRACKING_{name}" for name in ("AUTH", "AWS_SIGV4", "INSECURE_TLS", "SERVER_CERT_PATH", "CLIENT_CERT_PATH")
)
"""Variables of logins and certificates that only MLflow's client supports. With one of them no server is asked."""

T = TypeVar("T")


def check_form(form: Mapping[str, Any], check: Callable[[str], T]) -> T:
    """Ask the places that a pipeline's form names, and return what `check` returns, which checks the rest of the form.

    Args:
        form: Parameters of the task, `store_uri`, `mlflow_uri` and `advanced` among them.
        check: Takes the store: the form's `store_uri`, or the platform's bucket if that is empty.

    Raises:
        FlexfleetError: What `check` raises and an error for each place that cannot be used, as one (`together`).
    """
    advanced = dict(form["advanced"]) if isinstance(form["advanced"], Mapping) else {}
    # Before an address with a password is asked.
    no_passwords({name: value for name, value in form.items() if name != "advanced"} | advanced)
    store, wrong = form["store_uri"] or platform_store(), list[FlexfleetError]()
    if not store:
        wrong.append(ConfigError("`store_uri` is empty. Enter s3://bucket/prefix, or a folder of a volume."))
    dvc = next((value for name, value in advanced.items() if name.rpartition(":")[2].strip() == "publish.dvc"), None)
    wrong += unusable(store, form["mlflow_uri"] or platform_uri(), dvc)
    try:
        found = check(store or Config().run.store)
    except FlexfleetError as error:
        raise together([error, *wrong]) from error
    if wrong:
        raise together(wrong)
    return found


def unusable(store: Any, mlflow: Any, dvc: Any) -> list[FlexfleetError]:
    """Ask all places at the same time, and return an error for each one that cannot be used. Takes at most DEADLINE_S
    seconds. A value that is None or malformed is skipped, since `check` reports malformed addresses.

    Args:
        store: Address or folder of the runs. An object is created in it and deleted.
        mlflow: Tracking URI. A server is asked; a file is not.
        dvc: DVC remote. An object is created in it and deleted.
    """
    asked: dict[str, Callable[[], None]] = {}
    for name, uri in ((place("store_uri", store), store), ("publish.dvc", dvc)):
        with suppress(ConfigError):
            if isinstance(uri, str) and uri:
                check_place(name, uri)
                asked[name] = partial(_write, uri)
    with suppress(ConfigError):
        if isinstance(mlflow, str) and mlflow:
            check_address(mlflow)
            asked["tracking.mlflow"] = partial(_ask_mlflow, mlflow)
    found: dict[str, FlexfleetError] = {}

    def ask(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except FlexfleetError as error:
            found[name] = type(error)(f"{name} cannot be used: {error}")
        except Exception as error:
            found[name] = EnvironmentFailure(f"{name} cannot be used: {first_line(error)}")

    threads = {name: threading.Thread(target=ask, args=(name, call), daemon=True) for name, call in asked.items()}
    until = time.monotonic() + DEADLINE_S
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            found.setdefault(name, Unreachable(f"{name} cannot be used: no answer within {DEADLINE_S:.0f} s"))
    return [found[name] for name in asked if name in found]


def _write(uri: str) -> None:
    """Create and delete an object. Raises EnvironmentFailure if the store refuses or does not answer."""
    store, key = open_store(uri, hasty=True), f"probe-{uuid.uuid4().hex[:8]}"
    store.put(key, b"flexfleet checks that it can write here")
    store.delete(key)


def _ask_mlflow(uri: str) -> None:
    kind = uri.partition("://")[0].partition("+")[0].lower()
    if kind in ("http", "https"):
        _ask_server(uri)
    elif kind in databases.KINDS:
        client_of(uri).search_experiments(max_results=1)


def _ask_server(uri: str) -> None:
    """List an experiment over HTTP. MLflow's client would take two seconds of CPU time for its import. Raises
    Unreachable or Refused."""
    import requests  # MLflow requires it

    given, shown = os.environ.get, masked(uri)
    if any(map(given, OTHER_LOGINS)):
        return
    user, password, token = (given(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN"))
    login = (user, password) if user and password else None
    headers = {"Authorization": f"Bearer {token}"} if token and not login else {}
    url = f"{address(uri).rstrip('/')}/api/2.0/mlflow/experiments/search"
    try:
        answer = requests.get(url, {"max_results": "1"}, auth=login, headers=headers, timeout=ANSWER_S)
        is_mlflow = answer.ok and isinstance(answer.json(), dict)
    except ValueError:  # not JSON
        is_mlflow = False
    except requests.RequestException as error:
        raise Unreachable(f"{shown} does not answer: {first_line(error)}. Check the address") from error
    if not is_mlflow:
        raise Refused(
            f"{shown} is not an MLflow server that answers (HTTP status {answer.status_code}). Check the address and "
            "the login (Secret flexfleet-mlflow)"
        )

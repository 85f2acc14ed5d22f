"""Read the address and the credentials of an S3 server from environment variables, and create boto3's client."""

from __future__ import annotations

import functools
import os
from typing import Any

from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.text import is_http

AT_ONCE = 64
"""Maximum number of overlapping requests (`overlapping`). boto3 keeps this number of connections. A coordinator sends
small requests to a thousand devices' mailboxes; fewer large requests overlap (`overlapping.AT_ONCE_BYTES`)."""
OWN = "FLEXFLEET_"
"""Prefix of boto3's environment variables that apply only to the run store."""
SIGNING = "FLEXFLEET_SIGNING_"
"""Prefix of the variables with the credentials for signing devices' URLs."""


def connect(endpoint: str | None, settings: str, tries: int, timeouts: tuple[float, float]) -> Any:
    """Return boto3's client for S3.

    Args:
        endpoint: Address of the server; None for the address in the environment.
        settings: Prefix of the variables with the address and the credentials.
        tries: Maximum number of attempts for a request.
        timeouts: Seconds to wait for a connection and for data.

    Raises:
        ConfigError: The address is malformed, or a credential is missing.
    """
    import boto3.session
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    named = http_address("endpoint", endpoint) if endpoint else endpoint_of(settings)
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "total_max_attempts": tries},
        connect_timeout=timeouts[0],
        read_timeout=timeouts[1],
        max_pool_connections=AT_ONCE,
        s3={"addressing_style": "path"} if named else {},
        # Disable boto3's newer checksums, which only Amazon's servers support. This module verifies data with SHA-256
        # and MD5 instead.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    given = _credentials(settings) or _credentials(OWN)
    core = botocore.session.Session()
    core.register_component("data_loader", _services())
    session = boto3.session.Session(*given or (), botocore_session=core)
    named_region = setting("AWS_REGION", settings) or setting("AWS_DEFAULT_REGION", settings)
    region = named_region or core.get_config_variable("region") or "us-east-1"  # `region` is in ~/.aws/config
    try:
        return session.client("s3", endpoint_url=named, region_name=region, config=config)
    except BotoCoreError:  # some BotoCoreErrors subclass ValueError, so they must be caught first
        raise
    except ValueError as error:
        raise ConfigError(f"AWS_ENDPOINT_URL must be http(s)://host:port: {masked(str(error))}") from None


@functools.cache
def _services() -> Any:
    """Return botocore's service descriptions. The result is cached, because reading the files is slow."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


def _credentials(prefix: str) -> tuple[str, str, str | None] | None:
    key, secret, token = (
        os.environ.get(f"{prefix}AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
    )
    if key and secret:
        return key, secret, token or None
    if key or secret or token:
        raise ConfigError(f"Set both {prefix}AWS_ACCESS_KEY_ID and {prefix}AWS_SECRET_ACCESS_KEY, or unset both")
    return None


def setting(name: str, settings: str = OWN) -> str | None:
    """Return the value of an environment variable. The variable with the prefix `settings` is used first, then the
    variable with the prefix OWN, then the variable without a prefix."""
    return os.environ.get(f"{settings}{name}") or os.environ.get(f"{OWN}{name}") or os.environ.get(name)


def endpoint_of(settings: str = OWN) -> str | None:
    """Return the server's address; None for Amazon's server. Raises ConfigError for an invalid address."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if address := setting(name, settings):
            return http_address(name, address)
    return None


def http_address(name: str, address: str) -> str:
    """Return the address. Raises ConfigError with the parameter's `name` for an invalid address."""
    if not is_http(address):
        raise ConfigError(f"{name} must be http://host:port or https://host:port, got {masked(address)!r}")
    return address

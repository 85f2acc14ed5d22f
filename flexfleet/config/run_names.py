"""Check the names of runs, comparisons, studies and nightly runs, which are used as folder names and S3 keys."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from fl_engine.core.errors import ConfigError

if TYPE_CHECKING:
    from flexfleet.config.schema import Config

LONGEST = 150
"""Maximum length of a name in UTF-8 bytes. File systems allow 255 bytes, but a suffix is added to some names."""


def check_name(name: str, what: str) -> str:
    """Return `name`. Raise ConfigError if `name` cannot be the name of a folder, or is longer than LONGEST bytes.
    `what` is the option or parameter that sets the name."""
    wrong = not isinstance(name, str) or not name or not name.isprintable() or name != name.strip()
    if wrong or "/" in name or "\\" in name or name[0] in ".-" or len(name.encode()) > LONGEST:
        raise ConfigError(
            f"{what} must be a plain name of at most {LONGEST} bytes, got {str(name)[:80]!r}. A name must not contain "
            "slashes or control characters, and must not begin with '.' or '-'"
        )
    return name


def new_name(config: Config) -> str:
    """Generate a run's name from the algorithm, the seed, the time, and six random digits."""
    return dated(f"{config.algorithm['name']}-s{config.seed}".replace(":", "."))


def dated(kind: str) -> str:
    """Generate a name from `kind`, the time, and six random digits."""
    return f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"

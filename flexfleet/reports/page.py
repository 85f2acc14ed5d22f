"""Makes the HTML pages of reports, comparisons, studies and nights: each is one file that loads nothing from elsewhere.

A page is a Jinja template `<package>/<name>.html`; it begins with the head that all pages share (head.html).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from fl_engine.core.errors import EnvironmentFailure


class Drawing(str):
    """An SVG element, which a template inserts as it is; Jinja escapes any other text."""

    def __html__(self) -> str:
        return self


Filters = Mapping[str, Callable[..., Any]]
"""Functions that a template calls by name."""


def render(package: str, name: str, filters: Filters | None = None, **values: Any) -> str:
    """The page of the template `name` in `package`. Raises EnvironmentFailure where jinja2 is not installed."""
    return str(template(package, name, tuple((filters or {}).items())).render(**values))


@cache
def template(package: str, name: str, filters: tuple[tuple[str, Callable[..., Any]], ...]) -> Any:
    """Compiled once in a process for the same functions, which takes longer than rendering a page. Raises as `render`
    does."""
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError as error:
        raise EnvironmentFailure("the page needs jinja2: pip install 'flexfleet[tracking]'") from error

    def source(file: str) -> str:
        where = "flexfleet.reports" if file == "head.html" else package
        return resources.files(where).joinpath(file).read_text("utf-8")

    environment = Environment(
        loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= dict(filters)
    return environment.get_template(name)

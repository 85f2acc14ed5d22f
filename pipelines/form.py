"""Build the forms of the pipelines from form.json, which `components.describe` creates from the schema. Because the
file contains the defaults, descriptions and choices, this module does not import torch."""

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Field(NamedTuple):
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    """Values in the drop-down list of the form."""


FILE = Path(__file__).with_name("form.json")
NO_STORE = "empty: the platform's bucket, if the Secret flexfleet-s3 names one (S3_STORE)."
"""Part of the description of `store_uri` that explains which store is used if the field is empty."""
FIELDS = {name: Field(**about) for name, about in json.loads(FILE.read_text("utf-8")).items()} | {
    "mlflow_uri": Field(
        "", "Tracking URI of an MLflow server; empty: the server that Kubeflow sets for tasks, otherwise no tracking."
    ),
    "store_uri": Field("", f"s3://bucket/prefix of all runs, or a folder of a volume; {NO_STORE}"),
}
"""Form fields by name. The defaults of `mlflow_uri` and `store_uri` differ from params.yaml, because a task cannot
write files on the user's machine."""


def form(without: Sequence[str] = (), **own: Field) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds FIELDS to a pipeline's graph, except the fields in `without`. Fields in `own` are
    added, or replace fields with the same name. The graph receives all fields as keyword arguments."""

    def decorate(graph: Callable[..., None]) -> Callable[..., None]:
        fields = {name: field for name, field in (FIELDS | own).items() if name not in without}

        def called(*given: Any) -> None:
            graph(**dict(zip(fields, given, strict=True)))

        # kfp reads the form from the function's signature, and the descriptions from the function's docstring.
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=field.default,
                annotation=dict[str, Any] if isinstance(field.default, dict) else type(field.default),
            )
            for name, field in fields.items()
        ]
        lines = "".join(f"    {name}: {field.meaning}\n" for name, field in fields.items())
        called.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        called.__name__, called.__module__ = graph.__name__, graph.__module__
        called.__doc__ = f"{inspect.getdoc(graph)}\n\nArgs:\n{lines}"
        return called

    return decorate

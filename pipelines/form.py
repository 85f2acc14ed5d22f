"""The forms of the pipelines: they have the parameters of form.json, which `components.describe` makes from the schema.
So compiling reads defaults, meanings and choices without importing torch."""

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Field(NamedTuple):
    """One line of a form."""

    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    """The values that the form offers as a list."""


FILE = Path(__file__).with_name("form.json")
NO_STORE = "empty: the platform's bucket, if the Secret flexfleet-s3 names one (S3_STORE)."
"""What an empty `store_uri` means."""
FIELDS = {name: Field(**about) for name, about in json.loads(FILE.read_text("utf-8")).items()} | {
    "mlflow_uri": Field(
        "", "Tracking URI of an MLflow server; empty: the one that Kubeflow gives tasks, else no tracking."
    ),
    "store_uri": Field("", f"s3://bucket/prefix of all runs, or a folder of a volume; {NO_STORE}"),
}
"""The fields of the forms, by name. `mlflow_uri` and `store_uri` mean something else here than in params.yaml, because
a task cannot write files on the user's machine."""


def form(without: Sequence[str] = (), **own: Field) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a graph the form of FIELDS, except the fields in `without`; its `own` fields are added, or replace those of
    the same name. The graph is called with all of them by name."""

    def decorate(graph: Callable[..., None]) -> Callable[..., None]:
        fields = {name: field for name, field in (FIELDS | own).items() if name not in without}

        def called(*given: Any) -> None:
            graph(**dict(zip(fields, given, strict=True)))

        # kfp reads the form from a function's signature, and the meanings from its docstring.
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

"""The workflow class that the recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.core.imports import import_object
from areal_mega.rollout.workflow import Workflow, WorkflowContext


def load_workflow(path: str, kwargs: Mapping[str, Any], context: WorkflowContext) -> Workflow:
    """Construct the workflow that the recipe names.

    Raises:
        UserError: no such class, not a `Workflow`, or one that does not take these kwargs.
    """
    cls = import_object(path, "workflow")
    if not (isinstance(cls, type) and issubclass(cls, Workflow)):
        raise UserError(f"workflow '{path}' is not a subclass of areal_mega.rollout.workflow.Workflow")
    check_kwargs(cls, path, kwargs)
    return cls(context, **kwargs)


def check_kwargs(cls: type[Workflow], path: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse kwargs that the constructor does not take, before it runs: a TypeError from inside it is another matter."""
    import inspect

    try:
        inspect.signature(cls).bind(None, **kwargs)
    except TypeError as error:
        raise UserError(f"workflow '{path}': {error}; it takes {inspect.signature(cls)} (workflow.kwargs: {sorted(kwargs)})") from None

"""Objects named in a recipe by import path."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from areal_mega.core.errors import UserError


def import_object(path: str, what: str) -> Any:
    """Import ``package.module.name`` or ``package.module:name``.

    Args:
        path: the import path; the module must be importable from the working directory or the environment.
        what: what the object is for, as the recipe calls it (``workflow``, ``reward``, …); goes into the message.

    Raises:
        UserError: no such module or no such name in it. Errors raised *while* the module is imported pass through unchanged:
            they are faults of that module and deserve their own traceback.
    """
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise UserError(f"{what} '{path}': not an import path; write package.module.name or package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the absence of the named module (or a parent of it) is a wrong path; a missing dependency inside it is not.
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise UserError(f"{what} '{path}': no module named '{error.name}'; start from the folder that holds it, or install it") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        import difflib

        close = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise UserError(f"{what} '{path}': module '{module_name}' has no '{name}'{hint}") from error

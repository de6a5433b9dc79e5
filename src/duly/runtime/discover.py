"""Finds the application a process works for: ``DULY_APP``, else the installed default, else an empty one."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from duly.errors import Refused

if TYPE_CHECKING:
    from duly.app import Duly

log = structlog.get_logger("duly.discover")
GROUP = "duly.apps"
DEFAULT = "default"


def find_app(value: str = "") -> Duly:
    """The application that ``value`` (``package.module:attribute``) names, or the installed one."""
    from duly.app import Duly

    if value:
        return _checked(_load(value, "DULY_APP"), value)
    for found in importlib.metadata.entry_points(group=GROUP, name=DEFAULT):
        if _is_installed(found.module):
            return _checked(_load(found.value, f"the entry point {GROUP}:{DEFAULT}"), found.value)
        log.warning("app_not_installed", module=found.module)
    log.info("app_empty")
    return Duly()


def _is_installed(module: str) -> bool:
    """An entry point can outlive its package: that is no application, as against a broken one."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _load(value: str, origin: str) -> Any:
    module_name, _, attribute = value.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not attribute.isidentifier():
        raise Refused(f"{origin} must look like package.module:attribute, not {value!r}")
    module = _import(module_name, origin)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise Refused(f"{origin} is {value}, but the module {module_name} has nothing called {attribute}") from None


def _import(name: str, origin: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does: an application in the working directory is found
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise Refused(f"{origin} names the module {name}, but there is no {error.name}") from error
        raise Refused(f"{origin} names the module {name}, which needs {error.name}: install it") from error
    except Exception as error:
        raise Refused(f"importing {name} for {origin} failed: {type(error).__name__}: {error}") from error


def _checked(found: Any, value: str) -> Duly:
    from duly.app import Duly

    if not isinstance(found, Duly):
        raise Refused(f"{value} is a {type(found).__name__}, not a duly.Duly: name the object made by Duly()")
    return found

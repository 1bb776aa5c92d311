"""Packages that only some features need: imported when they run, and named where one is missing."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any


def import_extra(name: str, extra: str) -> Any:
    """Return a module that needs the packages of an extra.

    Raises:
        ImportError: one cannot be imported; names the extra. A broken package keeps its words.
    """
    try:
        return import_module(name)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name
        words = f"{error.name} is not installed" if is_missing else " ".join(str(error).split())
        message = f"{words}; run: pip install 'neuronmm-ops[{extra}]'"
        raise ImportError(message, name=error.name) from error


def version_of(package: str) -> str | None:
    """Return the version of a package; None where it is not installed, or in part."""
    try:
        return distribution(package).metadata.get_all("Version", [None])[0]
    except PackageNotFoundError:
        return None


def transformers_models() -> Any:
    """Return `neuronmm_ops.hf`, with Transformers silent. Raises ImportError that names the extra.

    Its progress bars and hints would bury ours; what matters is raised by `hf.load`.
    """
    logging = import_extra("transformers.utils.logging", "hf")
    hf = import_extra("neuronmm_ops.hf", "hf")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return hf

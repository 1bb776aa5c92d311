"""Errors and warnings that callers may want to catch by name."""


class NonFiniteError(ValueError):
    """A weight, an activation or a logit is NaN or Inf."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or disagrees with its config."""


class NkiVersionError(RuntimeError):
    """The installed NKI is of a version that the kernels cannot be called through."""


class NkiVersionWarning(UserWarning):
    """The installed NKI is newer than the lines that this package was tested with."""


class WorkerLostError(RuntimeError):
    """One of many workers has ended, or does not answer."""


def missing_extra(error: ImportError, extra: str) -> ImportError:
    """Return the error of an import with the extra to install; a broken package keeps its words."""
    is_missing = isinstance(error, ModuleNotFoundError) and error.name
    words = f"{error.name} is not installed" if is_missing else " ".join(str(error).split())
    return ImportError(f"{words}; run: pip install 'neuronmm-ops[{extra}]'", name=error.name)


class CalibrationWarning(UserWarning):
    """The calibration data is too small for the factors to be trusted."""


class CompressionWarning(UserWarning):
    """Nothing was compressed, or much less of the model than the targets' name promises."""

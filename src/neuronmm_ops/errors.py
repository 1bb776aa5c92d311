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


class CalibrationWarning(UserWarning):
    """The calibration data is too small for the factors to be trusted."""


class CompressionWarning(UserWarning):
    """Nothing was compressed, or much less of the model than the targets' name promises."""

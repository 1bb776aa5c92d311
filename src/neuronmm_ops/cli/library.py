"""`neuronmm_ops.hf`, imported by the commands that need it when they run."""

from typing import Any

from neuronmm_ops.errors import missing_extra


def transformers_models() -> Any:
    """Return `neuronmm_ops.hf`, without progress bars. Raises ImportError that names the extra."""
    try:
        from transformers.utils import logging

        from neuronmm_ops import hf
    except ImportError as error:
        raise missing_extra(error, "hf") from error
    # Its progress bars and hints would bury ours; what matters is raised by hf.load.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return hf

"""NxD Inference's `inference_demo` for compressed checkpoints, with all of its options."""

import sys
from collections.abc import Callable
from importlib import import_module

from neuronmm_ops.engines.nxdi.models import register
from neuronmm_ops.engines.nxdi.record import OptionError
from neuronmm_ops.errors import CheckpointError


def reported(engine: str, run: Callable[[], None]) -> int:
    """Run an engine's command; say in one line what is refused, and return the exit code."""
    try:
        run()
    except (CheckpointError, ImportError, OptionError) as error:
        print(f"neuronmm_ops.engines.{engine}: {error}", file=sys.stderr)
        return 2
    return 0


def _demo() -> None:
    demo = import_module("neuronx_distributed_inference.inference_demo")
    register(demo.MODEL_TYPES)
    demo.main()


def main() -> int:
    """Run `inference_demo` with compressed models; return the exit code."""
    return reported("nxdi", _demo)


if __name__ == "__main__":
    sys.exit(main())

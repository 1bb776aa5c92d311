"""`optimum-cli export neuron` for compressed checkpoints, with all of its options."""

import sys
from importlib import import_module

from neuronmm_ops.engines.nxdi.__main__ import reported
from neuronmm_ops.engines.optimum import register


def main() -> None:
    """Run optimum-neuron's export with compressed models."""
    register()
    import_module("optimum.exporters.neuron.__main__").main()


if __name__ == "__main__":
    sys.exit(reported("optimum", main))

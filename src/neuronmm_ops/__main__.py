"""The command line as a module, for launchers: `torchrun ... -m neuronmm_ops compress ...`."""

import sys

from neuronmm_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())

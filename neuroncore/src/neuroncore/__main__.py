"""`python -m neuroncore` is the command `neuroncore`."""

import sys

from neuroncore.cli import main

sys.exit(main())

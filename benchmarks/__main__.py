"""`python benchmarks COMMAND` from a clone: its modules are those of the package `benchmarks`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from benchmarks.cli import main

    sys.exit(main())

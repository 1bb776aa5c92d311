"""Entry point of the console script `neuronmm`.

Not in the package, whose import takes a second for torch: Ctrl-C in that second is handled here.
"""

import os
import signal
import sys
from typing import NoReturn


def main() -> int:
    """Run the command line of `sys.argv` and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    # nohup and shells' background jobs ignore the signal: so do we then.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    from neuronmm_ops import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()


def _exit(*_: object) -> NoReturn:
    # At once: an exception would pass through imports that print or hide it.
    os.write(2, b"neuronmm: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())

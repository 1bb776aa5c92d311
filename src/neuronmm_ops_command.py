# PYTHON_ARGCOMPLETE_OK
"""Entry point of the console script `neuronmm`."""

import sys


def main() -> int:
    """Run the command line of `sys.argv` and return its exit code."""
    try:
        from neuronmm_ops import cli
    except KeyboardInterrupt:
        print("neuronmm: interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

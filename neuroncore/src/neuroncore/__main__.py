"""`python -m neuroncore`: the command; `python -m neuroncore FILE.py ...` is its `run`."""

import sys

from neuroncore.cli import main

arguments = sys.argv[1:]
sys.exit(main(["run", *arguments] if arguments and arguments[0].endswith(".py") else arguments))

"""What proves the claims of this repository; not part of the wheel.

`python benchmarks COMMAND` runs one, from the root of the repository.
"""

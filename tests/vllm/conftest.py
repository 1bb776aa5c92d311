"""Checkpoints that the tests share, and the servers of them."""

import pytest
from checkpoints import compressed


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A compressed Llama with every Linear low-rank."""
    return compressed(tmp_path_factory.mktemp("served") / "llama")

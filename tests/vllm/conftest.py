"""What the tests of the server share."""

import pytest
from checkpoints import served


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A Llama with every Linear low-rank."""
    return served(tmp_path_factory.mktemp("served") / "llama")

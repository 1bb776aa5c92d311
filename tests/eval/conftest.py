"""What `datasets` writes goes into a temporary directory, and nothing is looked for online."""

import pytest


@pytest.fixture(autouse=True)
def _offline(caches):
    pass

"""A tiny model's shapes."""

from pathlib import Path

import pytest
from tiny_model import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "tiny"
    path.mkdir()
    return write_tiny(path)

"""Tiny models, compressed once, and copies to damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from measured_models import compressed
from tiny import tiny_directory


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `dense`, and `a` and `b` compressed from it."""
    root = tmp_path_factory.mktemp("places")
    dense = tiny_directory(root / "dense")
    compressed(dense, root / "a", 0.2)
    compressed(dense, root / "b", 0.6, storage="int8")
    return root


@pytest.fixture
def copied(places: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a model to where a test may damage it."""
    return lambda name: Path(shutil.copytree(places / name, tmp_path / f"{name}-copy"))

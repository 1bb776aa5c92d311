"""What `datasets` writes goes into a temporary directory, and nothing is looked for online."""

from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, which is empty."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    # lm-eval asks for it, and it runs programs for two seconds.
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"

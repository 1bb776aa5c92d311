"""lm-eval's tasks on a loaded model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuronmm_ops.compress.calibrate import Progress


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    include_path: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run tasks of lm-eval's harness on a loaded causal LM."""
    raise NotImplementedError

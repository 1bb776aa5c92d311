"""lm-eval's Hugging Face model with checks: what would quietly change a score raises instead.

Importing this module imports lm_eval.
"""

from typing import Any

import torch
from lm_eval.models import huggingface
from torch import Tensor

from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.errors import NonFiniteError

_HFLM: Any = huggingface.HFLM


class CheckedLM(_HFLM):
    """A loaded causal LM for lm-eval. Log-likelihoods are computed in fp32.

    Attributes:
        truncated: requests so far whose context was cut to the model's limit.
    """

    truncated: int = 0

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer must have BOS or EOS, with which lm-eval begins a text without "
                "context, got neither; set bos_token in its tokenizer_config.json"
            )
        options = {"softmax_dtype": torch.float32, **options}
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation must hold between 1 and the model's limit of "
                    f"{self.max_length} tokens, got {len(continuation)}"
                )
            self.truncated += len(context) + len(continuation) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)

    def _model_call(self, *arguments: Any, **named: Any) -> Tensor:
        logits = super()._model_call(*arguments, **named)
        # -Inf is how models mask unused vocabulary; a row's greatest is finite all the same.
        if not torch.isfinite(logits.amax(dim=-1)).all():
            raise NonFiniteError(
                "logits must be finite, got NaN or Inf; a request is never skipped: check the "
                "factors, or evaluate in a wider dtype"
            )
        return logits


class Harness(CheckedLM):
    """The model that `run_tasks` gives to lm-eval: it tells a function how far it has come."""

    def __init__(
        self, model: Any, tokenizer: Any, progress: Progress | None, **options: Any
    ) -> None:
        super().__init__(model, tokenizer, **options)
        self._progress = progress
        self._done = self._total = 0

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        self._done, self._total = 0, len(requests)
        result = super().loglikelihood(requests, disable_tqdm)
        if self._done < self._total:  # several requests shared a forward pass
            self._advance(self._total - self._done)
        self._total = 0
        return result

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text."""
        result: list[float] = []
        for index, request in enumerate(requests):
            result += super().loglikelihood_rolling([request], disable_tqdm)
            self._tell(index + 1, len(requests))
        return result

    def _model_call(self, inps: Tensor, *arguments: Any, **named: Any) -> Tensor:
        logits = super()._model_call(inps, *arguments, **named)
        if self._total:
            self._advance(len(inps))
        return logits

    def _advance(self, units: int) -> None:
        self._done += units
        self._tell(self._done, self._total)

    def _tell(self, done: int, total: int) -> None:
        if self._progress:
            self._progress("evaluate tasks", done, total)

"""Greedy generation that decodes on the simulated NeuronCore, with the modelled time of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from neuroncore import simulate
from neuroncore.hardware import resolve_target
from neuronmm_ops.hf.generate import generate_text
from neuronmm_ops.nn.fused_decoder import fuse_decoder_, linear_operands, unfuse_
from neuronmm_ops.ops import use_impl, xw
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.backends.simulated import record_profiles
from neuronmm_ops.plan import plan_op
from neuronmm_ops.plan.launches import PlannedKernel, planned_kernels
from neuronmm_ops.plan.rms_norm import plan_rms_norm
from neuronmm_ops.storages import size_of, storage_of

if TYPE_CHECKING:
    from neuroncore import Profile


class SimulatedText(NamedTuple):
    """What the simulated core wrote.

    Attributes:
        text: without the prompt.
        new_tokens: the first of which comes from the prompt's pass.
        target: trn1, trn2 or trn3.
        launches: kernels of one decoded token, in their order.
        times_us: modelled, of these launches: by the middle, the least and the greatest DMA model.
    """

    text: str
    new_tokens: int
    target: str
    launches: tuple[str, ...]
    times_us: tuple[float, float, float]


def generate_simulated(
    model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int, chat: bool = False
) -> SimulatedText:
    """Continue a prompt as `generate_text` does, each decode step on the core.

    Consecutive decoder layers of one window are one launch; the last norm and the head, which finds
    the greatest logit, are others. The prompt's pass, and reading a row of the embedding, are not
    in the times. Where the model's generation config changes logits, the CPU's are taken.

    Args:
        model: a causal LM that `fuse_decoder_` takes, on a CPU; fused for the call alone.
        tokenizer: the model's.
        prompt: text to continue; with `chat` the message of a user to answer.
        max_new_tokens: at least 2: the first needs no decode step.
        chat: put the prompt into the tokenizer's chat template.

    Raises:
        ValueError: as `generate_text` and `fuse_decoder_` do; the head has a bias; a layer has no
            kernel of its shape; or the model ends its text before a decode step.
    """
    if max_new_tokens < 2:
        raise ValueError(f"a decode step needs at least 2 new tokens, got {max_new_tokens}")
    with record_profiles() as launched:
        ending = _Ending(model, launched)
        fuse_decoder_(model, layers=max(1, model.config.get_text_config().num_hidden_layers))
        ending.norm.forward, ending.head.forward = ending.normed, ending.logits
        try:
            with use_impl("simulated"):
                text, new = generate_text(
                    *(model, tokenizer, prompt, max_new_tokens, chat, "static"), processor=ending
                )
        finally:
            del ending.norm.forward, ending.head.forward
            unfuse_(model)
    step = ending.step  # of one shape, every token takes what the last one does
    if not step:
        raise ValueError("the model ended its text at the first token; give another prompt")
    times = [(each.time_ms, each.time_low_ms, each.time_high_ms) for each in step]
    middle, low, high = [1e3 * sum(column) for column in zip(*times, strict=True)]
    kernels = tuple([each.kernel_name for each in step])
    return SimulatedText(text, new, ending.target, kernels, (middle, low, high))


class _Ending(LogitsProcessor):
    """A model's last norm and head, on the core after the prompt's pass.

    Args:
        model: what `fuse_decoder_` takes.
        launched: gets the profiles of ops.

    Attributes:
        step: profiles of the last decode step's launches.
    """

    def __init__(self, model: Any, launched: list[Profile]) -> None:
        self.norm, self.head = model.get_decoder().norm, model.get_output_embeddings()
        self.linear = linear_operands(model, "lm_head")
        if self.linear.bias is not None:
            raise ValueError("lm_head has a bias; run without the backend simulated")
        self.target = resolve_target(None).target
        self.launched = launched
        self.is_prompt = True
        self.step: list[Profile] = []
        self.chosen: tuple[Tensor, Tensor, Tensor] | None = None

    def normed(self, x: Tensor) -> Tensor:
        """RMSNorm of x [B, M, H], as of two sums: a launch of layers returns them apart."""
        if self.is_prompt:
            return type(self.norm).forward(self.norm, x)
        rows, dtype = x.flatten(0, 1), name_of(x.dtype)
        planned = plan_rms_norm(*rows.shape, residual=True, dtype=dtype, target=self.target)
        operands, eps = (rows, torch.zeros_like(rows), self.norm.weight), self.norm.variance_epsilon
        return self._run(planned, operands, eps=eps)[1].view(x.shape)

    def logits(self, x: Tensor) -> Tensor:
        """The CPU's logits [B, M, V] of x [B, M, H]; keeps what the core finds."""
        with use_impl("reference"):
            logits: Tensor = type(self.head).forward(self.head, x)
        if self.is_prompt:
            self.is_prompt = False
        else:
            if not any(each.kernel_name.startswith("decoder_layer") for each in self.launched):
                raise ValueError(
                    "a decoder layer has no kernel for these sizes on the simulated core; run "
                    "without the backend simulated"
                )
            ids, greatest = self._greatest(x.flatten(0, 1))
            self.step = [*self.launched]
            self.chosen = logits[:, -1].float(), ids.long(), greatest
        self.launched.clear()
        return logits

    def _greatest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The id of the greatest logit of each row of x [M, K], and the logit."""
        _, u, v, u_scale, v_scale, _ = self.linear
        low = x if u is None else xw(x, u, None, u_scale)
        storage = storage_of(v.dtype)
        plan = plan_op(
            *("lm_head", len(x), (size_of(v),), name_of(x.dtype), self.target),
            weight_dtype=storage.dtype if storage else "",
        )
        ids, greatest = self._run(planned_kernels(plan)[0], (low, v, v_scale))
        return ids, greatest

    def _run(self, planned: PlannedKernel, operands: Any, **options: Any) -> Any:
        options |= {"target": self.target, **planned.arguments}
        done = simulate(planned.kernel, *operands, **options)
        self.launched.append(done.profile)
        return done.outputs

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Let the core's greatest logit be the only one of scores [B, V] that others left alone."""
        del input_ids
        if self.chosen is None or not torch.equal(scores, self.chosen[0]):
            return scores
        _, ids, greatest = self.chosen
        lowest = torch.full_like(scores, -torch.inf)
        return lowest.scatter(1, ids[:, None], greatest[:, None])

"""Greedy generation that decodes on the simulated NeuronCore, with the modelled time of a token."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from neuronmm_ops.hf.generate import generate_text
from neuronmm_ops.nn.fused_decoder import fuse_decoder_, is_fused, unfuse_
from neuronmm_ops.ops import last_profile, use_impl


class SimulatedText(NamedTuple):
    """What the simulated core wrote.

    Attributes:
        text: without the prompt.
        new_tokens: the first of which comes from the prompt's pass.
        target: trn1, trn2 or trn3.
        times_us: modelled, of the decoder layers for one decoded token: by the middle, the least
            and the greatest DMA model.
    """

    text: str
    new_tokens: int
    target: str
    times_us: tuple[float, float, float]


def generate_simulated(
    model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int, chat: bool = False
) -> SimulatedText:
    """Continue a prompt as `generate_text` does, each decoder layer of a decode step on the core.

    The prompt's pass, embedding, last norm and head run on the CPU and are not in the times.

    Args:
        model: a causal LM that `fuse_decoder_` takes, on a CPU; fused for the call alone.
        tokenizer: the model's.
        prompt: text to continue; with `chat` the message of a user to answer.
        max_new_tokens: at least 2: the first needs no decode step.
        chat: put the prompt into the tokenizer's chat template.

    Raises:
        ValueError: as `generate_text` and `fuse_decoder_` do; a layer has no kernel of its shape;
            or the model ends its text before a decode step.
    """
    if max_new_tokens < 2:
        raise ValueError(f"a decode step needs at least 2 new tokens, got {max_new_tokens}")
    passes: dict[nn.Module, int] = {}
    profiles: list[Any] = []

    def note(layer: nn.Module, args: Any, output: Tensor) -> None:
        passes[layer] = passes.get(layer, 0) + 1
        if passes[layer] == 1:  # the prompt's
            return
        profile = _profile()
        name = "" if profile is None else profile.kernel_name
        if not name.startswith("decoder_layer") or profile in profiles[-1:]:
            raise ValueError(
                "a decoder layer has no kernel for these sizes on the simulated core; run without "
                "the backend simulated"
            )
        profiles.append(profile)

    fuse_decoder_(model)
    layers = [module for module in model.modules() if is_fused(module)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        with use_impl("simulated"):
            text, new = generate_text(model, tokenizer, prompt, max_new_tokens, chat, "static")
    finally:
        for hook in hooks:
            hook.remove()
        unfuse_(model)
    step = profiles[-len(layers) :]  # of one shape, every token takes what the last one does
    if not step:
        raise ValueError("the model ended its text at the first token; give another prompt")
    times = [(each.time_ms, each.time_low_ms, each.time_high_ms) for each in step]
    middle, low, high = [1e3 * sum(column) for column in zip(*times, strict=True)]
    return SimulatedText(text, new, step[0].target, (middle, low, high))


def _profile() -> Any:
    """Return the profile of the last launch; None before the first."""
    try:
        return last_profile()
    except RuntimeError:
        return None

"""LoRA on the factors of a model: peft's adapters on pairs of Linears, merged at the end."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.extras import import_extra
from neuronmm_ops.hf.pairs import from_pairs, to_pairs
from neuronmm_ops.recover.config import RecoverConfig

PhaseParameters = Mapping[str, nn.Parameter]


@contextmanager
def adapted(model: PreTrainedModel, config: RecoverConfig) -> Generator[list[PhaseParameters]]:
    """Hold the model's low-rank layers as pairs with adapters for a block, then merge these.

    Yields the parameters of each phase: for `sequential` the adapters of every u, then of every
    v. Where the block raises, the adapters are dropped.

    Raises:
        ImportError: peft is not installed.
    """
    peft = import_extra("peft", "recover")
    names = list(low_rank_layers(model))
    lora = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_rank,
        target_modules=[f"{name}.{factor}" for name in names for factor in ("u", "v")],
    )
    to_pairs(model)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            wrapped = peft.get_peft_model(model, lora)
        try:
            trained = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
            yield _phases(trained, config)
        except BaseException:
            wrapped.unload()
            raise
        wrapped.merge_and_unload()
    finally:
        from_pairs(model)


def _phases(trained: PhaseParameters, config: RecoverConfig) -> list[PhaseParameters]:
    if config.lora_order == "joint":
        return [trained]
    return [
        {name: p for name, p in trained.items() if f".{factor}.lora_" in name}
        for factor in ("u", "v")
    ]

"""lm-eval's model type `neuronmm`, and lm-eval's command line with it.

lm-eval (0.4.13) finds model types in a table of its own and has no plugins, so its command line
knows this one where this module starts it:

    python -m neuronmm_ops.hf.lm_eval run --model neuronmm --model_args pretrained=DIR --tasks piqa

In Python, importing this module is enough: `simple_evaluate(model="neuronmm", ...)`.
"""

import sys
from typing import Any

import torch

from neuronmm_ops.compress.record import set_compute_
from neuronmm_ops.eval.extra import import_quietly
from neuronmm_ops.hf.computing import AUTO, load_computing
from neuronmm_ops.hf.loading import load_tokenizer

CheckedLM: Any = import_quietly("neuronmm_ops.eval.harness").CheckedLM
register_model: Any = import_quietly("lm_eval.api.registry").register_model


@register_model("neuronmm")
class NeuronMM(CheckedLM):
    """A causal LM, compressed or dense, loaded as the commands load theirs."""

    def __init__(
        self,
        pretrained: str,
        dtype: str = AUTO,
        device: str = "cpu",
        compute: str | None = None,
        **options: Any,
    ) -> None:
        """Load a model and its tokenizer.

        Args:
            pretrained: a directory, or a hub id.
            dtype: to compute in, see `hf.load_computing`.
            device: of torch.
            compute: products of low-rank layers in `fp8` or `x`; default what the checkpoint says.
            options: of lm-eval's HFLM.
        """
        # lm-eval's command line says cuda:0 on every machine.
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"
        model = load_computing(pretrained, dtype, device)
        if compute is not None:
            set_compute_(model, compute)
        super().__init__(model, load_tokenizer(pretrained), **options)


def main() -> None:
    """Run lm-eval's command line; bad input is one line."""
    try:
        import_quietly("lm_eval.__main__").cli_evaluate()
    except (ValueError, OSError) as error:
        print("lm_eval:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

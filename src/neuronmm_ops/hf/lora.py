"""LoRA on top of layers that are stored in one byte; imports peft."""

import warnings
from typing import Any, NoReturn

from peft.tuners.lora import Linear

MERGE = (
    "LoRA cannot be merged into numbers in one byte, which would be rounded anew; keep the adapter "
    "on top of them, or adapt and merge after hf.to_pairs(model), which has them as nn.Linear"
)


class LoraBeside(Linear):
    """peft's LoRA of a layer that it sees as a whole: `layer(x) + scale * B(A(x))`.

    Raises:
        ValueError: it is to be merged.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            # peft reads in_features and out_features, and says that it does not know the class.
            warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            super().__init__(*args, **options)

    def merge(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse."""
        raise ValueError(MERGE)

"""What NeuronMM (arXiv 2510.25977) measured in its Figure 1, on one core of trn1."""

from typing import NamedTuple

SOURCE = "arXiv 2510.25977, Figure 1, read off the plot"
TARGET = "trn1"
SIZES = (8192, 4096, 16384)
"""K, r and N; bfloat16."""
GIB = 1024**3


class Reading(NamedTuple):
    """What the figure shows at one number of tokens; None where another marker hides it."""

    ms: float | None
    gib: float | None = None

    @property
    def hbm_bytes(self) -> int | None:
        """The traffic in bytes."""
        return None if self.gib is None else round(self.gib * GIB)


READINGS: dict[str, dict[int, Reading]] = {
    "NeuronMM": {
        1024: Reading(2.8, 0.23),
        2048: Reading(5.3, 0.5),
        4096: Reading(10.5, 0.98),
        8192: Reading(21.2, 1.90),
        16384: Reading(42.1, 3.80),
        32768: Reading(84.15, 7.49),
    },
    "NKI XUV": {
        2048: Reading(7.0),
        4096: Reading(14.0),
        8192: Reading(26.0, 3.5),
        16384: Reading(56.5, 9.6),
        32768: Reading(117.2, 22.4),
    },
    "NKI XW": {
        1024: Reading(None, 0.7),
        2048: Reading(None, 1.15),
        4096: Reading(16.3, 2.0),
        8192: Reading(43.9, 4.3),
        16384: Reading(89.0, 15.6),
        32768: Reading(186.60, 35.8),
    },
}
"""The paper's fused, unfused and dense kernels by tokens. At 32K tokens the fused and the dense
time are in the paper's text; all others are read off the plot."""
TOKENS = tuple(READINGS["NeuronMM"])
KERNELS = {"neuronmm_published": "NeuronMM", "xuv_unfused": "NKI XUV", "xw": "NKI XW"}
"""The name in `READINGS` of each kernel of `bench kernels` that the paper measured."""

"""Compiles the kernels for an H100, which needs no GPU: a program, for Triton is imported once."""

from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from neuronmm_ops.ops.cuda import kernels

WEIGHTS = {"fp8": "*i8", "int8": "*i8", "int4": "*u8"}
CONSTANTS = {"BLOCK_M": 16, "BLOCK_N": 32, "HAS_BIAS": True, "ACTIVATION": "gelu"}


def compiled(name: str, dtype: str, stored: str) -> int:
    """Return the bytes of a kernel whose weights lie along the contraction."""
    kernel = getattr(kernels, name)
    constants = CONSTANTS | {"STORED": stored}
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        kinds = {"w": WEIGHTS.get(stored, f"*{dtype}"), "s": "*fp32", "x": f"*{dtype}"}
        kinds |= {"y": "*fp32" if name == "low_kernel" else f"*{dtype}", "b": f"*{dtype}"}
        is_number = "_" in argument or argument[0].isupper()
        signature[argument] = "i32" if is_number else kinds[argument[0]]
    constants |= {f"w{n}_row": 1 for n in (0, 1)}
    constants |= {name: 4 for name in kernel.arg_names if name.startswith("STEPS")}
    taken = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature |= dict.fromkeys(taken, "constexpr")
    places = {(kernel.arg_names.index(key),): value for key, value in taken.items()}
    source = ASTSource(kernel, {key: signature[key] for key in kernel.arg_names}, places)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


if __name__ == "__main__":
    stored = ("", *WEIGHTS)
    for case in product(("low_kernel", "high_kernel"), ("bf16", "fp16"), stored):
        assert compiled(*case), case
    print("compiled")

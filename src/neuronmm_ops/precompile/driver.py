"""NKI's compiler on one kernel, in a process of its own: `python -m ... DIRECTORY`.

Reads request.json there and writes result.json, kernel.neff for the Neuron runtime and
backend_config.b64 for the custom call of a graph. No device is opened. These calls are in NKI 0.6
and 0.7. Sources of their signatures, on machines without a device too: zml/zml f223acc,
platforms/neuron/nki_kernel_compiler.py (`CompileOptions`, what a custom call takes), and
aws-neuron/nkipy b91c980, nkipy/src/nkipy/core/nki_op.py: `compile_kernel_to_nir` is what
frameworks use, inputs are NumPy arrays by name with the defaults applied, and
`disable_backend_optimizations` is how kernels compile in production.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from neuroncore.dtypes import dtype_of

REQUEST, RESULT, NEFF, CONFIG = (
    *("request.json", "result.json"),
    *("kernel.neff", "backend_config.b64"),
)


def main(directory: Path) -> None:
    """Compile the kernel that the directory's request names."""
    request = json.loads((directory / REQUEST).read_text())
    start = perf_counter()
    result: dict[str, Any] = {"verdict": "compiled"}
    try:
        _compile(request, directory)
    except Exception as error:
        is_driver = isinstance(error, ImportError) and str(error.name).startswith("nki.")
        result = {
            "verdict": "no driver" if is_driver else "refused",
            "error": type(error).__name__,
            "message": str(error)[:4000],
        }
    result["seconds"] = perf_counter() - start
    (directory / RESULT).write_text(json.dumps(result))


def _compile(request: dict[str, Any], directory: Path) -> None:
    from nki.compiler.ncc_driver import CompileOptions, compile_bir_to_neff
    from nki.framework.compiled import compile_kernel_to_nir

    kernel, lnc = getattr(import_module(request["module"]), request["kernel"]), request["lnc"]
    operands = [_zeros(each) for each in request["operands"]]
    bound = inspect.signature(kernel.func).bind(*operands, **request["arguments"])
    bound.apply_defaults()
    options = CompileOptions(
        target=request["target"],
        lnc=lnc,
        output_path=str(directory / NEFF),
        artifacts_dir=str(directory / "artifacts"),
    ).disable_backend_optimizations()
    compiled = compile_kernel_to_nir(
        kernel if lnc == 1 else kernel[lnc],
        inputs=dict(bound.arguments),
        compile_opts=options,
        enable_cache=False,  # the artifacts shall be here
    )
    (directory / CONFIG).write_bytes(compiled.build_config().backend_config_b64)
    compile_bir_to_neff(
        options,
        compiled,
        input_arrays=[],
        argument_names=[spec.name for spec in compiled.descriptor.input_specs],
        output_arg_names=[spec.name for spec in compiled.descriptor.output_specs],
    )
    if not (directory / NEFF).is_file():
        raise RuntimeError("the compiler ended without an error, and without a NEFF")


def _zeros(described: Any) -> Any:
    """An operand of the kernel, or a tuple of them, from what the request says of it."""
    if described is None:
        return None
    if len(described) == 2 and isinstance(described[1], str):
        return np.zeros(described[0], dtype_of(described[1]).numpy)
    return tuple([_zeros(each) for each in described])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

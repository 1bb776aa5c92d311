"""Time the default compression next to SVD-LLM's procedure, on a model of Llama-3.2-1B's shape.

`python examples/compress_1b.py` writes the model with random weights to a temporary directory, as
`full_shape.py` does, and compresses its MLPs by either in turn, in one process. `--layers 2` takes
minutes; the seconds per layer of the default are then too high: it also runs the output head.
"""

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from full_shape import make_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.models import model_shape
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import progress_bars

TOKENS = 32 * 1024
SEQLEN = 2048


class Spent(NamedTuple):
    """What a procedure took."""

    procedure: str
    layers: int
    compute_dtype: str
    wall_s: float
    cpu_s: float
    peak_rss_gib: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and the seconds per layer."""
        per_layer = {
            "wall_s_per_layer": self.wall_s / self.layers,
            "cpu_s_per_layer": self.cpu_s / self.layers,
        }
        return {**self._asdict(), **per_layer}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    transformers_logging.disable_progress_bar()
    layers = options.layers or model_shape(options.shape).layers
    config = SVDConfig(ratio=options.ratio, block=options.block)
    samples = max(1, options.tokens // options.seqlen)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        dense = make_model(Path(place) / "dense", options.shape, layers)
        text = _python_source(8 * options.tokens)

        def ours() -> str:
            with progress_bars() as progress:
                report = hf.compress(
                    dense,
                    config,
                    text,
                    Path(place) / "small",
                    samples=samples,
                    seqlen=options.seqlen,
                    dtype=options.dtype,
                    stream=options.stream,
                    progress=progress,
                )
            return str(report.provenance["compute_dtype"])

        def theirs() -> str:
            model = cast(LlamaForCausalLM, hf.load_computing(dense, options.dtype))
            tokenizer = hf.load_tokenizer(dense)
            batches = hf.calibration_batches(tokenizer, text, samples, options.seqlen)
            rows = [row for batch in batches for row in batch.split(1)]
            with progress_bars() as progress:
                for done, _ in enumerate(svd_llm(model, rows, config), start=1):
                    progress("svd-llm", done, 3 * layers)
            return name_of(model.dtype)

        # Ours first: what an earlier one leaves allocated counts to the peak of a later one.
        spent = [measured("neuronmm-ops", layers, ours), measured("SVD-LLM", layers, theirs)]
    _show(spent, options)


@torch.no_grad()
def svd_llm(
    model: LlamaForCausalLM, rows: Sequence[Tensor], config: SVDConfig
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each MLP projection's name and factors `u[K, r]`, `v[r, N]`, as SVD-LLM finds them.

    What its public code does where memory is short: layer by layer, a second moment `[K, K]` for
    every Linear in fp64, its Cholesky factor S, the whole SVD of W S in fp32 and the inverse of S.
    Layers are fed the dense model's activations.

    Args:
        model: dense.
        rows: token ids `[1, T]`.
        config: whose uniform rule gives the ranks.
    """
    hidden, arguments = _first_inputs(model, rows)
    for index, layer in enumerate(model.model.layers):
        linears = {
            f"mlp.{name}": module
            for name, module in cast(nn.Module, layer.mlp).named_children()
            if isinstance(module, nn.Linear)
        }
        moments: dict[str, Tensor] = {}
        hooks = [m.register_forward_pre_hook(_adding(moments, n)) for n, m in linears.items()]
        hidden = [layer(x, **arguments) for x in hidden]
        for hook in hooks:
            hook.remove()
        for name, linear in linears.items():
            rank = config.rank(linear.in_features, linear.out_features)
            assert rank is not None
            weight = linear.weight.float()
            s = torch.linalg.cholesky(_positive(moments.pop(name))).float()
            p, sigma, qh = torch.linalg.svd(weight @ s, full_matrices=False)
            root = sigma[:rank].sqrt()
            u = (root[:, None] * qh[:rank] @ torch.linalg.inv(s)).t()
            yield f"model.layers.{index}.{name}", u, root[:, None] * p[:, :rank].t()


class _FirstLayerReachedError(Exception):
    pass


def _first_inputs(
    model: LlamaForCausalLM, rows: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The first layer's inputs `[1, T, H]`, and what else all layers are called with."""
    hidden: list[Tensor] = []
    arguments: dict[str, Any] = {}

    def record(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden.append(args[0])
        arguments.update(kwargs)
        raise _FirstLayerReachedError

    hook = model.model.layers[0].register_forward_pre_hook(record, with_kwargs=True)
    for row in rows:
        try:
            model.model(row, use_cache=False)
        except _FirstLayerReachedError:
            continue
    hook.remove()
    return hidden, arguments


def _adding(moments: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
    def add(_: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0].flatten(0, -2).double()
        product = x.t() @ x
        moments[name] = moments[name].add_(product) if name in moments else product

    return add


def _positive(moment: Tensor) -> Tensor:
    """The moment where it has a Cholesky factor, else with its diagonal shifted until it does."""
    if int(torch.linalg.cholesky_ex(moment).info) == 0:
        return moment
    shift = 1e-6 - float(torch.linalg.eigvalsh(moment)[0])
    return moment + shift * torch.eye(len(moment), dtype=moment.dtype)


def measured(procedure: str, layers: int, run: Callable[[], str]) -> Spent:
    """Run it once, which returns its compute dtype, and return what it took."""
    _reset_peak_rss()
    wall, cpu = time.perf_counter(), time.process_time()
    dtype = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Spent(procedure, layers, dtype, wall, cpu, _peak_rss_gib())


def _reset_peak_rss() -> None:
    path = Path("/proc/self/clear_refs")  # Linux alone
    if path.exists():
        path.write_text("5")


def _peak_rss_gib() -> float | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**20


def _python_source(characters: int) -> str:
    """So much of the standard library's source; random weights do not mind what they read."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        if sum(map(len, texts)) >= characters:
            break
    return "".join(texts)[:characters]


def _show(spent: Sequence[Spent], options: argparse.Namespace) -> None:
    ours, theirs = spent
    document = {
        "shape": options.shape,
        "ratio": options.ratio,
        "tokens": options.tokens,
        "stream": options.stream,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("neuronmm-ops", "torch", "transformers")},
        "procedures": [each.to_dict() for each in spent],
        "wall_quotient": theirs.wall_s / ours.wall_s,
        "cpu_quotient": theirs.cpu_s / ours.cpu_s,
    }
    print(json.dumps(document, indent=2))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="Llama-3.2-1B", help="a shape of the registry")
    parser.add_argument("--layers", type=int, help="decoder layers (default: the shape's)")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of calibration")
    parser.add_argument("--seqlen", type=int, default=SEQLEN)
    parser.add_argument("--dtype", default="auto", help="to compute in, as `neuronmm compress` has")
    parser.add_argument(
        "--stream", action="store_true", help="ours with one decoder layer in memory at a time"
    )
    parser.add_argument("--directory", type=Path, help="where the model is written meanwhile")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

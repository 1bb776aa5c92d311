"""What a storage costs: one model dense, and low rank at equal ranks and at equal bytes.

Dense weights and native factors are bfloat16 numbers and everything is computed in float32, so that
what differs is the rounding of the weights alone. Tokens are paired: every model predicts the same.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress import SVDConfig, collect_moments, compress_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.gradients import collect_gradients
from neuronmm_ops.compress.nested import gradient_kinds
from neuronmm_ops.compress.quantize import nearest_pair
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.compress.rounding import output_metrics, round_pair, rounding_sides
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.eval import block_length, encode_documents
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.nn.swap import Factors, swap_modules_
from neuronmm_ops.storages import STORAGES, factor_bytes

RATIOS = (0.2,)
# Roundings are compared on factors of the dense model's inputs; `kfac-drift` has others.
DEFAULT = SVDConfig(block=16, method="kfac")
# How v's and u's errors are kept small, for models of the same ranks; the first is the default.
ROUNDINGS = ("feedback", "folded", "nearest")


def run(
    directory: str | Path,
    texts: Mapping[str, str],
    calibration: str,
    ratios: Sequence[float] = RATIOS,
    samples: int = 64,
    seqlen: int | None = None,
    device: str = "cpu",
    config: SVDConfig = DEFAULT,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compress a trained model's MLPs into each storage and compare what each predicts.

    Args:
        directory: a Transformers checkpoint with its tokenizer, or a hub id.
        texts: name to the text to evaluate on.
        calibration: to calibrate on; other text than `texts`.
        ratios: nominal compression ratios.
        samples: calibration blocks.
        seqlen: tokens of a block; default the smaller of 2048 and the model's limit.
        device: to compute on.
        config: the method, the targets and the block; small, so that a small model has many ranks.
        progress: told `("storages", models done, models in all)`.

    Returns:
        For each ratio, model and text: `ratio` (0 of dense matrices), `storage` (`bf16`, or of
        `STORAGES`), `equal` (`ranks`, those of bf16, or `bytes`; None of dense matrices),
        `rounding` (of `ROUNDINGS`; `native` of bf16),
        `bytes` of the targeted matrices, `dense_bytes`, `text`, `tokens`, `dense_ppl_token`,
        `ppl_token`, `excess_log_ppl`, `excess_quotient` (by that of bf16 factors), `quotient_error`
        (the standard error of it, over paired tokens), `kl` (the mean divergence of the dense
        model's predictions from this one's, in nats), and `kl_quotient`.

    Raises:
        ValueError: the calibration text is shorter than one block, a text than two tokens, or a
            block longer than the model takes.
        NonFiniteError: a model's logits are NaN or Inf.
        CheckpointError: the directory cannot be loaded.
    """
    from neuronmm_ops import hf
    from neuronmm_ops.hf.computing import check_device, load_on

    place = check_device(device)
    tokenizer = hf.load_tokenizer(directory)
    dense = load_on(directory, place).bfloat16().float()
    seqlen = block_length(dense, seqlen)
    ids = {
        name: _blocks(name, encode_documents(tokenizer, [texts[name]]), seqlen) for name in texts
    }
    batches = hf.calibration_batches(tokenizer, calibration, samples, seqlen)
    batches = [batch.to(place) for batch in batches]
    rows: list[dict[str, Any]] = []
    configs = [replace(config, ratio=ratio, storage=None) for ratio in ratios]
    groups = [_dense_models(dense, config, batches)]
    groups += [_models(dense, each, batches) for each in configs]
    models = len(STORAGES) + len(ratios) * (1 + len(STORAGES) * (len(ROUNDINGS) + 1))
    for group in groups:
        native: dict[str, tuple[float, Tensor]] = {}
        for labels, model, size in group:
            for name, blocks in ids.items():
                sums, losses = _measured(dense, model, blocks)
                if labels["storage"] == "bf16":
                    native[name] = sums["kl"], losses
                quotients = _quotients(sums["kl"], losses, native.get(name))
                rows.append({**labels, **size, "text": name, **sums, **quotients})
            if progress:
                progress("storages", len(rows) // len(ids), models)
    return rows


def _blocks(name: str, ids: Tensor, seqlen: int) -> list[Tensor]:
    blocks = [block for block in ids.split(seqlen) if len(block) >= 2]
    if not blocks:
        raise ValueError(f"{name} must have at least 2 tokens, got {len(ids)}; use a longer text")
    return blocks


def _dense_models(dense: nn.Module, config: SVDConfig, batches: Sequence[Tensor]) -> Any:
    """Yield labels, a model of dense matrices in each storage, and its sizes."""
    for storage in STORAGES:
        labels = {"ratio": 0.0, "storage": storage, "equal": None, "rounding": ROUNDINGS[0]}
        stored = replace(config, ratio=0.0, storage=storage)
        yield labels, *_compressed(dense, stored, batches)


def _compressed(dense: nn.Module, config: SVDConfig, batches: Sequence[Tensor]) -> Any:
    """Return a model as `compress_` makes it of bfloat16 weights, and its sizes."""
    model = copy.deepcopy(dense)
    linears = select_targets(dense, config).linears
    report = compress_(model, config, batches, dtypes=dict.fromkeys(linears, torch.bfloat16))
    stored = sum(layer.bytes for layer in report.layers)
    return model, {"bytes": stored, "dense_bytes": _dense_bytes(linears)}


def _dense_bytes(linears: Mapping[str, DenseLinear]) -> int:
    return sum(2 * m.in_features * m.out_features for m in linears.values())


def _models(dense: nn.Module, config: SVDConfig, batches: Sequence[Tensor]) -> Any:
    """Yield labels, a compressed model, and its sizes; the one of bfloat16 factors first."""
    linears = select_targets(dense, config).linears
    dtypes = dict.fromkeys(linears, torch.bfloat16)
    model = copy.deepcopy(dense)
    compress_(model, config, batches, dtypes=dtypes)
    pairs = {
        name: (layer.u.detach().bfloat16().float(), layer.v.detach().bfloat16().float())
        for name, layer in low_rank_layers(model).items()
    }
    chosen = {name: linears[name] for name in pairs}

    def swapped(factors: Mapping[str, Factors], storage: str | None) -> Any:
        model = copy.deepcopy(dense)
        swap_modules_(model, factors)
        return model, {"bytes": _bytes(factors, storage), "dense_bytes": _dense_bytes(linears)}

    def _bytes(factors: Mapping[str, Factors], storage: str | None) -> int:
        total = 0
        for name, linear in linears.items():
            K, N = linear.in_features, linear.out_features
            if name in factors:
                total += factor_bytes(K, N, factors[name][0].shape[1], 2, storage)
            else:
                total += 2 * K * N
        return total

    ratio = {"ratio": config.ratio}
    labels = {**ratio, "storage": "bf16", "equal": "ranks", "rounding": "native"}
    yield labels, *swapped(pairs, None)
    rounded: dict[tuple[str, str], dict[str, Factors]] = {
        (storage, how): {} for storage in STORAGES for how in ROUNDINGS
    }
    kinds = gradient_kinds(config, chosen)
    metrics = output_metrics(config, chosen, collect_gradients(dense, kinds, batches))
    sides = rounding_sides(config, chosen)
    moments = collect_moments(dense, sides, batches) if sides else ((n, None) for n in chosen)
    for name, moment in moments:
        for storage, how in rounded:
            rounded[storage, how][name] = (
                nearest_pair(*pairs[name], storage)
                if how == "nearest"
                else round_pair(
                    name,
                    storage,
                    pairs[name],
                    linears[name].weight,
                    moment,
                    metrics.get(name),
                    folded=how == "folded",
                )
            )
    for (storage, how), factors in rounded.items():
        labels = {**ratio, "storage": storage, "equal": "ranks", "rounding": how}
        yield labels, *swapped(factors, storage)
    for storage in STORAGES:
        labels = {**ratio, "storage": storage, "equal": "bytes", "rounding": ROUNDINGS[0]}
        equal = replace(config, storage=storage, budget="bytes")
        yield labels, *_compressed(dense, equal, batches)


@torch.inference_mode()
def _measured(
    dense: nn.Module, model: nn.Module, blocks: Sequence[Tensor]
) -> tuple[dict[str, Any], Tensor]:
    """Return what is measured of a model, and what each token's loss grows by, in fp64."""
    place = next(dense.parameters()).device
    before, grown, divergence = 0.0, [], 0.0
    for block in blocks:
        ids = block[None].to(place)
        expected, log_probs = (F.log_softmax(m(ids).logits[0, :-1], -1) for m in (dense, model))
        own = [F.nll_loss(x, ids[0, 1:], reduction="none").double() for x in (expected, log_probs)]
        before += float(own[0].sum())
        grown.append(own[1] - own[0])
        divergence += float((expected.exp() * (expected - log_probs)).double().sum())
    losses = torch.cat(grown)
    if not torch.isfinite(losses).all():
        raise NonFiniteError("logits must be finite, got NaN or Inf; check the checkpoint")
    tokens = len(losses)
    excess = float(losses.mean())
    return {
        "tokens": tokens,
        "dense_ppl_token": math.exp(before / tokens),
        "ppl_token": math.exp(before / tokens + excess),
        "excess_log_ppl": excess,
        "kl": divergence / tokens,
    }, losses


def _quotients(
    kl: float, losses: Tensor, native: tuple[float, Tensor] | None
) -> dict[str, float | None]:
    """Return the excess and the KL as multiples of those of native factors, where there are some.

    And the excess's standard error.
    """
    excess, error, divergence = None, None, None
    if native is not None and (of_native := float(native[1].mean())) > 0:
        excess = float(losses.mean()) / of_native
        # Of a quotient of means over the same tokens, to first order.
        spread = float((losses - excess * native[1]).std())
        error = spread / math.sqrt(len(losses)) / of_native
    if native is not None and native[0] > 0:
        divergence = kl / native[0]
    return {"excess_quotient": excess, "quotient_error": error, "kl_quotient": divergence}

"""What a draft may be, and how it is made of its model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.compress import SVDConfig, compress_
from neuronmm_ops.compress.batches import check_ids
from neuronmm_ops.compress.record import attached_report
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.compress.width import shares
from neuronmm_ops.draft.layers import depths, influences, keep_
from neuronmm_ops.eval import block_length, encode_documents
from neuronmm_ops.hf.computing import AUTO, computing_in, dtype_of, load_on
from neuronmm_ops.hf.drafts import RECORD
from neuronmm_ops.hf.loading import load, load_tokenizer
from neuronmm_ops.hf.provenance import CalibrationSource, ModelSource
from neuronmm_ops.hf.quantize import quantize
from neuronmm_ops.hf.saving import save
from neuronmm_ops.hf.text import read_text
from neuronmm_ops.hf.train import train_factors
from neuronmm_ops.manifest import Origin
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import Update
from neuronmm_ops.rank import STEP
from neuronmm_ops.recover.config import RecoverConfig
from neuronmm_ops.recover.data import hold_out
from neuronmm_ops.recover.state import StateFile

RATIOS = (0.3, 0.5, 0.7, 0.85)
STORAGES = ("int8", "fp8", "int4")
"""To which the fastest draft in the model's dtype is rounded."""
TARGETS = "all-linear"
PRUNE_SHARE = 0.75
"""Of what is removed, where the model's MLPs allow it: more tokens are accepted than of pairs."""
SEQLEN, SAMPLES, BATCH = 256, 128, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DraftConfig:
    """What a draft may be.

    Attributes:
        layers: numbers of the model's layers that it has.
        ratio: of the parameters of its Linears that are removed.
        storage: of its Linears; None for the model's dtype.
    """

    layers: tuple[int, ...]
    ratio: float
    storage: str | None = None


@dataclass(frozen=True)
class Maker:
    """Makes drafts of one model.

    Attributes:
        model: a directory or a hub id.
        tokenizer: the model's.
        text: that is learnt from and measured on.
        ids: `[T]` of the text, to learn from.
        held_out: `[B, seqlen]`.
        steps: to distil each draft towards the model; None for none.
        progress: as `draft` takes it.
    """

    model: str | Path
    tokenizer: Any
    text: Path
    ids: Tensor
    held_out: Tensor
    steps: int | None
    progress: Update | None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        directory: str | Path,
        text: Path,
        steps: int | None,
        progress: Update | None,
    ) -> Self:
        """Divide a text for a model; ValueError where it is short."""
        tokenizer = load_tokenizer(directory)
        ids = encode_documents(tokenizer, [read_text(text)])
        check_ids(model, ids, "text")
        calibration, held_out = hold_out(ids, min(SEQLEN, block_length(model, None)))
        return cls(directory, tokenizer, text, calibration, held_out, steps, progress)

    def grid(self) -> list[DraftConfig]:
        """Candidates in the model's dtype; layers that turn their inputs most are kept."""
        loaded = load_on(self.model, CPU)
        turned = influences(loaded, self._batches()[0])
        order = sorted(range(len(turned)), key=lambda number: -turned[number])
        kept = [tuple(sorted(order[:depth])) for depth in depths(loaded)]
        return [DraftConfig(layers, ratio) for layers in kept for ratio in RATIOS]

    def make(self, candidate: DraftConfig, folder: Path) -> None:
        """Write a candidate as a compressed checkpoint."""
        loaded = load_on(self.model, CPU)
        keep_(loaded, candidate.layers)
        compute, batches = dtype_of(AUTO, loaded), self._batches()
        dtypes = {name: linear.weight.dtype for name, linear in dense_linears(loaded).items()}
        with computing_in(loaded, compute):
            config = _config(loaded, candidate)
            report = compress_(loaded, config, batches, self.progress, dtypes=dtypes)
        taken = {"order": "spread", "samples": sum(map(len, batches)), "seqlen": self._seqlen}
        report = report.with_run(taken, name_of(compute), {})
        if self.steps is not None:
            config = RecoverConfig(steps=self.steps, seqlen=self._seqlen, hidden_weight=0.0)
            teacher = load_on(self.model, CPU).requires_grad_(False)
            state = StateFile(folder.with_suffix(".recovery"), repr(candidate))
            train_factors(loaded, teacher, self.ids, self.held_out, config, state, self.progress)
            state.remove()
        save(loaded, folder, report, self.tokenizer)

    def round(self, made: Path, storage: str, folder: Path) -> None:
        """Write a candidate that was made with its matrices in a storage."""
        text = self.tokenizer.decode(self.ids)  # not of what is held out
        taken: dict[str, Any] = {"samples": SAMPLES, "seqlen": self._seqlen}
        quantize(made, storage, text, folder, **taken, progress=self.progress)

    def keep(self, folder: Path, record: Mapping[str, Any], output: Path, force: bool) -> None:
        """Write a candidate that was made to the output, with its record."""
        loaded = load(folder)
        report = attached_report(loaded)
        assert report is not None  # `make` wrote it
        report = replace(report, provenance={**report.provenance, RECORD: dict(record)})
        of = CalibrationSource.of(self.text, read_text(self.text), SAMPLES, self._seqlen, "spread")
        origin = Origin("draft", asdict(ModelSource.of(self.model)), (of.named,))
        save(loaded, output, report, self.tokenizer, force, origin=origin)

    @property
    def _seqlen(self) -> int:
        return self.held_out.shape[1]

    def _batches(self) -> list[Tensor]:
        """Of `SAMPLES` blocks, spread over the text."""
        blocks = self.ids[: len(self.ids) // self._seqlen * self._seqlen].view(-1, self._seqlen)
        count = min(SAMPLES, len(blocks))
        return list(blocks[torch.arange(count) * len(blocks) // count].split(BATCH))


def _config(model: PreTrainedModel, candidate: DraftConfig) -> SVDConfig:
    """Blocks are the greatest power of two up to 128 of which every matrix may have one."""
    linears = select_targets(model, SVDConfig(targets=TARGETS)).linears.values()
    sizes = [(linear.in_features, linear.out_features) for linear in linears]
    least = int(min(K * N / (K + N) for K, N in sizes) * (1 - candidate.ratio))
    config = SVDConfig(
        ratio=candidate.ratio,
        block=min(128, max(STEP, 1 << least.bit_length() - 1)),
        targets=TARGETS,
    )
    narrower = shares(model, config, {}, (PRUNE_SHARE,))
    return narrower[0] if narrower else config

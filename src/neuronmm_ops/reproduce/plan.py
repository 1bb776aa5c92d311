"""The cells of a reproduction: which models, what is measured of each, and what decides it."""

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

import neuroncore
import neuronmm_ops
from neuronmm_ops import hf
from neuronmm_ops.compress import SVDConfig
from neuronmm_ops.eval.protocols import CORPORA, recipe_of
from neuronmm_ops.hf.loading import local_directory
from neuronmm_ops.hf.provenance import ModelSource
from neuronmm_ops.manifest import installed_versions
from neuronmm_ops.measure.timing import cpu_name
from neuronmm_ops.models import shape_from_config
from neuronmm_ops.reproduce.cells import Cell, key_of
from neuronmm_ops.reproduce.config import NATIVE, Reproduction
from neuronmm_ops.reproduce.texts import read_training_text
from neuronmm_ops.storages import STORAGES as ONE_BYTE

MODEL_PACKAGES = ("neuronmm-ops", "torch", "transformers", "tokenizers")
# The code that modelled times follow from, in addition to the simulator's.
MODELLED_BY = ("estimate", "plan", "kernels", "models.py", "rank.py", "compress/targets.py")


@dataclass(frozen=True)
class Variant:
    """One model: the dense one, or one compressed.

    Attributes:
        name: for people.
        method: its name in the file; None for the dense model.
        config: of the compression; None for the dense model.
        recovered: whether its factors are trained.
        steps: cells that make its checkpoint, in order; none for the dense model.
        cells: what is measured of it.
    """

    name: str
    method: str | None
    config: SVDConfig | None
    recovered: bool
    steps: tuple[Cell, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Study:
    """All that is to be done.

    Attributes:
        variants: those of one compression stand together, the recovered one last.
        left_out: what was asked for and cannot be, a line each.
        calibration: the text; None where no method needs one.
        recovery: the text; None where nothing is recovered.
        model: what names the dense model's weights, with its revision or their hash.
    """

    variants: tuple[Variant, ...]
    left_out: tuple[str, ...]
    calibration: str | None
    recovery: str | None
    model: Mapping[str, str]

    @property
    def cells(self) -> list[Cell]:
        """Every cell once, in the order in which they are done."""
        by_key = {c.key: c for v in self.variants for c in (*v.steps, *v.cells)}
        return list(by_key.values())


def plan(reproduction: Reproduction) -> Study:
    """Read what decides the results, and list the cells.

    Raises:
        ValueError: a text cannot be read.
        CheckpointError: the dense model is not there.
    """
    return _Planner(reproduction).plan()


class _Planner:
    def __init__(self, asked: Reproduction) -> None:
        self.asked = asked
        self.model = model_identity(asked.model.id)
        needs_text = any(config.needs_calibration for config in asked.methods.values())
        text = asked.compress.calibration if needs_text else None
        self.calibration = None if text is None else read_training_text(text, asked.data)
        text = asked.recovery and asked.recovery.data
        self.recovery = None if text is None else read_training_text(text, asked.data)
        self.place = {"dtype": asked.model.dtype, "device": asked.model.device}
        self.versions = installed_versions(*MODEL_PACKAGES)

    def plan(self) -> Study:
        variants, left_out = [self._dense()], list[str]()
        combined = product(
            self.asked.methods.items(), self.asked.compress.ratios, self.asked.compress.storages
        )
        for (method, config), ratio, storage in combined:
            named = None if storage == NATIVE else storage
            config = replace(config, ratio=ratio, storage=named)
            variant = self._compressed(method, config)
            variants.append(variant)
            if self.asked.recovery is None:
                continue
            if storage in ONE_BYTE:
                left_out.append(
                    f"{variant.name} recovered: factors in one byte are not recovered here"
                )
            else:
                variants.append(self._recovered(variant))
        texts = self.calibration, self.recovery
        return Study(tuple(variants), tuple(left_out), *texts, self.model)

    def _dense(self) -> Variant:
        cells = tuple(self._accuracy("dense", key_of(self.model)))
        return Variant("dense", None, None, False, (), cells)

    def _compressed(self, method: str, config: SVDConfig) -> Variant:
        compress = self.asked.compress
        name = " ".join(filter(None, (method, f"{config.ratio:g}", config.storage)))
        calibration = None
        if config.needs_calibration and self.calibration is not None:
            calibration = {
                "sha256": _sha256(self.calibration),
                "samples": compress.samples,
                "seqlen": compress.seqlen,
                "order": compress.order,
            }
        inputs = {
            "model": self.model,
            "config": config.to_dict(),
            "calibration": calibration,
            "stream": compress.stream,
            **self.place,
            "versions": self.versions,
        }
        step = Cell("compress", name, inputs)
        return Variant(name, method, config, False, (step,), self._measurements(name, step, config))

    def _recovered(self, base: Variant) -> Variant:
        assert self.asked.recovery is not None
        assert self.recovery is not None
        assert base.config is not None
        name = f"{base.name} recovered"
        inputs = {
            "of": base.steps[0].key,
            "config": self.asked.recovery.config.to_dict(),
            "text": _sha256(self.recovery),
            "device": self.asked.model.device,
            "versions": installed_versions(*MODEL_PACKAGES, "peft"),
        }
        step = Cell("recover", name, inputs)
        cells = self._measurements(name, step, base.config)
        return replace(base, name=name, recovered=True, steps=(*base.steps, step), cells=cells)

    def _measurements(self, name: str, step: Cell, config: SVDConfig) -> tuple[Cell, ...]:
        cells = [*self._accuracy(name, step.key)]
        if self.asked.measured is not None:
            machine = {
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
                "processor": cpu_name(),
            }
            inputs = {"of": step.key, **asdict(self.asked.measured), **machine, **self.place}
            cells.append(Cell("measured", name, {**inputs, "versions": self.versions}))
        if self.asked.modelled is not None:
            cells.append(modelled_cell(self.asked, config))
        return tuple(cells)

    def _accuracy(self, name: str, of: str) -> Iterator[Cell]:
        evaluate = self.asked.evaluate
        shared = {"of": of, **self.place}
        for text in evaluate.texts:
            inputs = {**shared, "seqlen": evaluate.seqlen, "text": self._text(text)}
            packages = ("datasets",) if text in CORPORA else ()
            inputs["versions"] = installed_versions(*MODEL_PACKAGES, *packages)
            yield Cell("perplexity", name, inputs, text)
        for task in evaluate.tasks:
            inputs = {
                **shared,
                "task": task,
                "num_fewshot": evaluate.num_fewshot,
                "limit": evaluate.limit,
                "batch_size": evaluate.batch_size,
                "include": _tasks_sha256(evaluate.include),
                "versions": installed_versions(*MODEL_PACKAGES, "lm-eval", "datasets"),
            }
            yield Cell("task", name, inputs, task)

    def _text(self, text: str) -> dict[str, Any]:
        if text not in CORPORA:
            return {"sha256": _sha256(hf.read_text(text))}
        protocol = self.asked.evaluate.protocol
        source = {"corpus": asdict(CORPORA[text]), "recipe": asdict(recipe_of(protocol, text))}
        return {**source, "data": self.asked.data}


def modelled_cell(asked: Reproduction, config: SVDConfig) -> Cell:
    """Return the cell of the modelled times of a compression; methods share it."""
    assert asked.modelled is not None
    shape = asdict(shape_from_config(local_directory(asked.model.id)))
    shape.pop("name")
    targets, storage = list(config.target_list), config.storage
    inputs = {
        "shape": shape,
        "ratio": config.ratio,
        "storage": storage,
        "targets": targets,
        **asdict(asked.modelled),
        "sources": _sources_sha256(),
    }
    return Cell("modelled", f"{' '.join(targets)} {config.ratio:g} {storage or NATIVE}", inputs)


def model_identity(model: str) -> dict[str, str]:
    """Name a model's weights: a hub id and its revision, or the SHA-256 of a directory.

    Raises:
        CheckpointError: it is not there.
    """
    directory = local_directory(model)
    if directory == Path(model):
        return {"sha256": ModelSource.of(model).sha256}
    return {"hub": model, "revision": directory.name}  # the cache's snapshots are so named


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tasks_sha256(directory: str | None) -> str | None:
    """Return a hash of a directory of task files, and of the files that they name."""
    if directory is None:
        return None
    named = {
        Path(word)
        for file in sorted(Path(directory).rglob("*.y*ml"))
        for word in re.split(r"[\s\"'\[\]{},]+", file.read_text(encoding="utf-8"))
        if "." in word and Path(word).is_file()
    }
    return _tree_sha256([Path(directory), *sorted(named)])


@cache
def _sources_sha256() -> str:
    root = Path(neuronmm_ops.__file__).parent
    simulator = Path(neuroncore.__file__).parent
    return _tree_sha256([simulator, *[root / name for name in MODELLED_BY]])


def _tree_sha256(places: list[Path]) -> str:
    digest = hashlib.sha256()
    for place in places:
        files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
        for file in files:
            if file.suffix != ".pyc":
                digest.update(f"{file.relative_to(place.parent)}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()

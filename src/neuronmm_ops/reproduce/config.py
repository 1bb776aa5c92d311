"""What a reproduction does, read from a TOML file and checked before anything runs.

Paths in the file are relative to the working directory; `evaluate.include` is looked for next
to the file first, where the shipped ones' lies.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from neuroncore.hardware import resolve_target
from neuronmm_ops.compress import SVDConfig
from neuronmm_ops.compress.config import STORAGES
from neuronmm_ops.eval.protocols import CORPORA, check_name
from neuronmm_ops.files import read_document
from neuronmm_ops.models import SHAPES
from neuronmm_ops.recover import RecoverConfig
from neuronmm_ops.reproduce.published import published
from neuronmm_ops.reproduce.schema import check_keys, checked_table, read_table
from neuronmm_ops.reproduce.texts import TRAINING_TEXTS

PAPERS = Path(str(files("neuronmm_ops.reproduce") / "papers"))
# Factors in the model's own dtype, without scales.
NATIVE = "native"
METHOD_NAME = re.compile(r"\w[\w .+()-]{0,59}")


@dataclass(frozen=True)
class Model:
    """The dense model: a directory or a hub id, and what to compute in and on."""

    id: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"


@dataclass(frozen=True)
class Compress:
    """What all methods share.

    Attributes:
        ratios: nominal compression ratios, each in (0, 1).
        storages: of the factors: `native` (the model's dtype), `bf16`, `fp8`, `int8`.
        calibration: a text file, or one of `TRAINING_TEXTS`.
        samples, seqlen, order, stream: as `hf.compress` takes them.
        block, alpha, targets: of every method that does not say otherwise, see `SVDConfig`.
        keep: whether checkpoints stay in OUT/models once all is measured.
    """

    ratios: tuple[float, ...]
    storages: tuple[str, ...] = (NATIVE,)
    calibration: str | None = None
    samples: int = 128
    seqlen: int | None = None
    order: Literal["spread", "head"] = "spread"
    stream: bool = False
    block: int = 128
    alpha: float = 0.5
    targets: tuple[str, ...] = ("mlp",)
    keep: bool = True


@dataclass(frozen=True)
class Recovery:
    """Training of every compressed model, in addition to the untrained one.

    Attributes:
        data: a text file, or one of `TRAINING_TEXTS`.
        config: how.
    """

    data: str
    config: RecoverConfig


@dataclass(frozen=True)
class Evaluate:
    """What accuracy is taken on.

    Attributes:
        texts: data sets of `CORPORA`, or text files.
        protocol: of the data sets' perplexities, see `eval.PROTOCOLS`.
        seqlen: tokens of a block; None for the protocol's, or the model's limit.
        tasks: of lm-eval.
        num_fewshot, limit, batch_size: as lm-eval takes them.
        include: a directory of further task files.
    """

    texts: tuple[str, ...] = ()
    protocol: Literal["standard", "svd-llm"] = "standard"
    seqlen: int | None = None
    tasks: tuple[str, ...] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 1
    include: str | None = None


@dataclass(frozen=True)
class Modelled:
    """End-to-end times on the simulated core, as `estimate.model.run` takes them."""

    target: str = "trn2"
    lnc: int = 1
    tp: int = 1
    prompt: int = 2048
    new: int = 256
    batch: int = 1


@dataclass(frozen=True)
class Measured:
    """Times of this machine, dense and compressed in turn, as `paired_speed` takes them."""

    prompt: int = 128
    new: int = 32
    rounds: int = 5


@dataclass(frozen=True)
class Reproduction:
    """A whole file.

    Attributes:
        title: of the table.
        model: the dense model.
        compress: ratios, storages, calibration.
        methods: name to method, with the first ratio and no storage; `variants` sets both.
        evaluate: texts and tasks.
        recovery: None for none.
        modelled: None for no modelled times.
        measured: None for no measured times.
        published: model whose published numbers stand next to ours; None for none.
        data: a directory with the data sets' files, see `eval.corpora.find_file`; None for the hub.
    """

    title: str
    model: Model
    compress: Compress
    methods: Mapping[str, SVDConfig]
    evaluate: Evaluate
    recovery: Recovery | None = None
    modelled: Modelled | None = None
    measured: Measured | None = None
    published: str | None = None
    data: str | None = None


_TABLES: dict[str, type] = {
    "model": Model,
    "compress": Compress,
    "evaluate": Evaluate,
    "modelled": Modelled,
    "measured": Measured,
}
"""Those whose keys are a class's fields."""


def shipped() -> dict[str, Path]:
    """Return the files that come with the package, by name."""
    return {path.stem: path for path in sorted(PAPERS.glob("*.toml"))}


def find(name: str) -> Path:
    """Return the path of a TOML file: one of the user's, or a shipped one by its name.

    Raises:
        ValueError: there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ValueError(f"cannot read {name}: no such file")
    check_name("reproduction", name, shipped())
    return shipped()[name]


def load(path: Path) -> Reproduction:
    """Read and check a file.

    Raises:
        ValueError: it is no TOML, or a key or a value in it is wrong: the line begins with the
            file's path.
    """
    try:
        return _parsed(tomllib.loads(read_document(path)), path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (TypeError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ValueError(f"{path}: {error}") from None


def check_files(asked: Reproduction) -> None:
    """Refuse texts that are neither known by name nor files, before anything runs.

    Raises:
        ValueError: there is such a text, or `data` is no directory.
    """
    if asked.data is not None and not Path(asked.data).is_dir():
        raise ValueError(f"data must be a directory, got {asked.data}")
    _check_text("compress.calibration", asked.compress.calibration, TRAINING_TEXTS)
    _check_text("recovery.data", asked.recovery and asked.recovery.data, TRAINING_TEXTS)
    for text in asked.evaluate.texts:
        _check_text("evaluate.texts", text, CORPORA)


def _parsed(values: dict[str, Any], path: Path) -> Reproduction:
    check_keys(values, Reproduction.__dataclass_fields__, "")
    for name in ("model", "compress", "methods"):
        if name not in values:
            raise ValueError(f"table [{name}] is missing")
    for name in ("title", "published", "data"):
        value = values.get(name, "")
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, got {value!r:.50}")
    tables = {n: read_table(kind, values[n], n) for n, kind in _TABLES.items() if n in values}
    asked: dict[str, Any] = {**values, **tables, "title": values.get("title") or path.stem}
    asked["methods"] = _methods(values["methods"], asked["compress"])
    asked["evaluate"] = _with_include(asked.get("evaluate", Evaluate()), path)
    if "recovery" in values:
        asked["recovery"] = _recovery(values["recovery"])
    reproduction = Reproduction(**asked)
    _check(reproduction)
    return reproduction


def _methods(values: object, compress: Compress) -> dict[str, SVDConfig]:
    table = checked_table(values, "methods")
    if not table:
        raise ValueError("[methods] must hold at least one table, such as [methods.kfac-drift]")
    if not compress.ratios or not compress.storages:
        raise ValueError("compress.ratios and compress.storages must not be empty")
    # Both are compress's, for every method.
    allowed = set(SVDConfig.__dataclass_fields__) - {"ratio", "storage"}
    shared = {n: getattr(compress, n) for n in ("block", "alpha", "targets")}
    methods: dict[str, SVDConfig] = {}
    for name, options in table.items():
        if not METHOD_NAME.fullmatch(name) or name == "dense":
            raise ValueError(
                "a method's name must be letters, digits, spaces and ._+()-, and not dense; "
                f"got {name!r:.50}"
            )
        where = f"methods.{name}"
        check_keys(checked_table(options, where), sorted(allowed), where)
        try:
            fields: dict[str, Any] = {**shared, **options, "ratio": compress.ratios[0]}
            methods[name] = SVDConfig(**fields)
            for ratio in compress.ratios:
                replace(methods[name], ratio=ratio)
            for storage in compress.storages:
                check_name("storage", storage, (NATIVE, *STORAGES))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
        twin = next(other for other, config in methods.items() if config == methods[name])
        if twin != name:
            raise ValueError(f"methods {twin} and {name} are the same; leave one out")
    return methods


def _recovery(values: object) -> Recovery:
    table = dict(checked_table(values, "recovery"))
    check_keys(table, ("data", *RecoverConfig.__dataclass_fields__), "recovery")
    data = table.pop("data", None)
    if not isinstance(data, str):
        raise ValueError(f"recovery.data must be a text file or one of {', '.join(TRAINING_TEXTS)}")
    return Recovery(data, read_table(RecoverConfig, table, "recovery"))


def _with_include(evaluate: Evaluate, path: Path) -> Evaluate:
    if evaluate.include is None:
        return evaluate
    for place in (path.parent / evaluate.include, Path(evaluate.include)):
        if place.is_dir():
            return replace(evaluate, include=str(place))
    raise ValueError(f"evaluate.include {evaluate.include} is no directory")


def _check(asked: Reproduction) -> None:
    """Check values that depend on one another."""
    if asked.modelled is not None:
        resolve_target(asked.modelled.target).check_lnc(asked.modelled.lnc, "modelled.lnc")
    if asked.published is not None:
        models = {number["model"] for number in published() if number["model"]} | set(SHAPES)
        check_name("model of published", asked.published, sorted(models))
    needing = [name for name, config in asked.methods.items() if config.needs_calibration]
    if needing and asked.compress.calibration is None:
        raise ValueError(f"compress.calibration is missing; method {needing[0]} needs a text")
    for where, tables in (("compress", asked.compress), ("evaluate", asked.evaluate)):
        for name in ("ratios", "storages", "texts", "tasks"):
            values = getattr(tables, name, ())
            if len(set(values)) < len(values):
                raise ValueError(f"{where}.{name} must not hold a value twice, got {list(values)}")
    positive = {"compress": ("samples", "seqlen"), "measured": ("prompt", "new", "rounds")}
    positive |= {"evaluate": ("seqlen", "limit", "batch_size")}
    positive |= {"modelled": ("tp", "prompt", "new", "batch")}
    for where, names in positive.items():
        for name in names:
            value = getattr(getattr(asked, where), name, None)
            if value is not None and value < 1:
                raise ValueError(f"{where}.{name} must be at least 1, got {value}")
    if (asked.evaluate.num_fewshot or 0) < 0:
        raise ValueError(f"evaluate.num_fewshot must not be negative: {asked.evaluate.num_fewshot}")


def _check_text(where: str, text: str | None, known: Mapping[str, Any]) -> None:
    """Refuse a text that is neither known by name nor a file."""
    if text is None or text in known or Path(text).is_file():
        return
    if Path(text).name != text or Path(text).suffix:
        raise ValueError(f"{where}: cannot read {text}: no such file")
    check_name(f"text of {where}", text, known)

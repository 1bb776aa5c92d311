"""What a compression did: ranks, losses, bytes and provenance, as data."""

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import Any, Self

import torch
from torch import nn

from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.rank import pair_bytes, parameter_count
from neuronmm_ops.storages import STORAGES, dtype_name, storage_named


@dataclass(frozen=True)
class LayerReport:
    """One targeted Linear, or the output head where it has a storage.

    Attributes:
        name: qualified name in the model.
        K: input features.
        N: output features.
        r: rank, or None where the layer stays dense.
        dense: whether the layer stays dense.
        reason: why it stays dense, else None.
        loss: exact relative loss of the truncation on the calibration data (of the weight's energy
            for `plain`), in [0, 1]; 0 for a dense layer, None for factors from elsewhere.
        bytes: of its matrices as they are now, scales included, without bias.
        dense_bytes: of the dense matrix.
        storage: of its factors, or its dense matrix, in one byte, `fp8` or `int8`; None for the
            model's dtype. In config.json it is the dtype's name.
        compute: `x`, or `fp8` where activations may be rounded to fp8, too, see `set_compute_`.
    """

    name: str
    K: int
    N: int
    r: int | None
    dense: bool
    reason: str | None
    loss: float | None
    bytes: int
    dense_bytes: int
    storage: str | None = None
    compute: str = "x"

    @property
    def parameters(self) -> int:
        """Number of parameters of its matrices as they are now."""
        return parameter_count(self.K, self.N, self.r)

    @property
    def is_replaced(self) -> bool:
        """Whether another module than the dense Linear stands there."""
        return self.r is not None or self.storage is not None

    @property
    def bits_per_weight(self) -> float:
        """Bits that are stored for each entry of the dense matrix."""
        return 8 * self.bytes / (self.K * self.N)

    @classmethod
    def of(
        cls,
        name: str,
        layer: DenseLinear | CompressedLinear,
        r: int | None,
        loss: float | None,
        reason: str | None = None,
        storage: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Describe the layer once it has rank `r` and that storage, or stays dense for None.

        A compressed layer's storage, and what it computes in, are its own. Bytes are of `dtype`,
        default the layer's.
        """
        K, N, itemsize = (
            layer.in_features,
            layer.out_features,
            (dtype or layer.weight.dtype).itemsize,
        )
        dense_bytes, compute = K * N * itemsize, "x"
        if isinstance(layer, CompressedLinear):
            storage, compute = layer.storage, layer.compute
        size = pair_bytes(K, N, r, itemsize, storage)
        return cls(name, K, N, r, r is None, reason, loss, size, dense_bytes, storage, compute)

    def takes(self, compute: str) -> bool:
        """Say whether the layer's products may be computed so: `x`, and what its storage says."""
        return compute == "x" or (
            self.storage is not None and compute in STORAGES[self.storage].computes
        )

    def dequantized(self) -> Self:
        """Describe the layer with its matrices in the model's dtype."""
        itemsize = self.dense_bytes // (self.K * self.N)
        size = self.parameters * itemsize
        return replace(self, bytes=size, storage=None, compute="x")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict."""
        return {**vars(self), "storage": dtype_name(self.storage)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote, checking every value.

        Earlier versions wrote neither storage nor compute.

        Raises:
            ValueError: a field is missing, unknown, of the wrong type or out of range.
        """
        values = {"storage": None, "compute": "x", **values}
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            odd = sorted(set(values) ^ names)[0]
            raise ValueError(f"a layer must have exactly {', '.join(sorted(names))}; see {odd!r}")
        layer = cls(**values)
        sizes, r, loss = (layer.K, layer.N, layer.bytes, layer.dense_bytes), layer.r, layer.loss
        if not isinstance(layer.name, str) or not all(map(is_count, sizes)):
            raise ValueError(f"layer {layer.name!r} must have positive integer sizes, got {sizes}")
        if layer.dense != (r is None) or not (r is None or is_count(r)):
            raise ValueError(
                f"{layer.name}: r must be a positive integer, or null for a dense layer; "
                f"got r={r!r}, dense={layer.dense!r}"
            )
        if loss is not None and not (type(loss) in (int, float) and 0 <= loss <= 1):
            raise ValueError(f"{layer.name}: loss must be a number in [0, 1] or null, got {loss!r}")
        if not isinstance(layer.reason, (str, type(None))):
            raise ValueError(f"{layer.name}: reason must be a text or null, got {layer.reason!r}")
        return layer._checked_storage()

    def _checked_storage(self) -> Self:
        """Return the report with its storage's name instead of the dtype's, once they are valid."""
        checked = self
        if self.storage is not None:
            try:
                checked = replace(self, storage=storage_named(self.storage))
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
        if not checked.takes(self.compute):
            raise ValueError(
                f"{self.name}: compute must be x, or fp8 with numbers in float8_e4m3fn; "
                f"got {self.compute!r} and storage {self.storage!r}"
            )
        return checked


@dataclass(frozen=True)
class LeftDense:
    """Matrices that a preset stands for and the compression cannot or does not take.

    Attributes:
        name: of the parameter, with `*` for the numbers of layers.
        parameters: of all of them together.
        share: of the whole dense model's parameters, in (0, 1].
        reason: why they stay dense.
    """

    name: str
    parameters: int
    share: float
    reason: str

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` wrote, checking every value.

        Raises:
            ValueError: a field is missing, unknown, of the wrong type or out of range.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            raise ValueError(f"left_dense must list objects of {', '.join(names)}; got {values!r}")
        left = cls(**values)
        if not isinstance(left.name, str) or not isinstance(left.reason, str):
            raise ValueError(f"left_dense: name and reason must be texts, got {values!r}")
        if not is_count(left.parameters):
            raise ValueError(
                f"left_dense {left.name}: parameters must be a positive integer, "
                f"got {left.parameters!r}"
            )
        if type(left.share) not in (int, float) or not 0 < left.share <= 1:
            raise ValueError(
                f"left_dense {left.name}: share must be a number in (0, 1], got {left.share!r}"
            )
        return left


@dataclass(frozen=True)
class NarrowedMLPs:
    """What was left out of the MLPs before pairs were found.

    Attributes:
        inner: inner features of each MLP in the dense model.
        kept: and now.
        parameters: that all MLPs lost.
        bytes: of them.
    """

    inner: int
    kept: int
    parameters: int
    bytes: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` wrote, checking every value.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            raise ValueError(f"narrowed must have exactly {', '.join(names)}; got {values!r}")
        if not all(map(is_count, values.values())) or values["kept"] >= values["inner"]:
            raise ValueError(f"narrowed: positive integers, kept below inner; got {values!r}")
        return cls(**values)


@dataclass(frozen=True)
class CompressionReport:
    """Result of `compress_`: what each layer became, and where the factors come from.

    Attributes:
        config: the config used; None where `swap_` was given the factors.
        layers: one entry for each targeted Linear, in model order.
        calibration: `{"tokens", "batches", "sha256"}`, from `hf.compress` also `{"order",
            "samples", "seqlen"}`; or None when the method needs none.
        provenance: model id and versions of the libraries, from `hf.compress` also
            `compute_dtype` and `compared`, from `hf.recover` `recovery`, a list with an entry a
            run. There is no seed: the method is deterministic.
        model_parameters: of the whole model while it was dense, tied ones counted once; None in
            records that do not say.
        left_dense: what the presets among the targets stand for and `layers` does not list, such
            as experts stacked in one parameter, largest first; empty in records that do not say.
        narrowed: what narrower MLPs removed before, of which `layers` say nothing; None where the
            config has no `prune_share`.
    """

    config: SVDConfig | None
    layers: tuple[LayerReport, ...]
    calibration: dict[str, Any] | None
    provenance: dict[str, Any]
    model_parameters: int | None = None
    left_dense: tuple[LeftDense, ...] = ()
    narrowed: NarrowedMLPs | None = None

    @property
    def ratio(self) -> float:
        """The nominal compression ratio asked for; the effective one where none was."""
        return self.effective_ratio if self.config is None else self.config.ratio

    @property
    def effective_ratio(self) -> float:
        """Fraction of the targeted matrices' parameters that is gone."""
        left = sum(layer.parameters for layer in self.layers)
        return self._removed / (left + self._removed)

    @property
    def model_ratio(self) -> float | None:
        """Fraction of the whole model's parameters that is gone; None if their number is."""
        return None if self.model_parameters is None else self._removed / self.model_parameters

    @property
    def dense_bytes(self) -> int:
        """Of the targeted matrices while they were dense, and all there."""
        narrowed = self.narrowed.bytes if self.narrowed else 0
        return narrowed + sum(layer.dense_bytes for layer in self.layers)

    @property
    def _removed(self) -> int:
        narrowed = self.narrowed.parameters if self.narrowed else 0
        return narrowed + sum(layer.K * layer.N - layer.parameters for layer in self.layers)

    def with_run(
        self, calibration: Mapping[str, Any], compute_dtype: str, compared: Mapping[str, str]
    ) -> Self:
        """Return the report with what `hf.compress` knows besides.

        Args:
            calibration: options of the calibration, added where there was one.
            compute_dtype: name of the dtype that was computed in.
            compared: `compared`, what `compare.described` says, or nothing.
        """
        return replace(
            self,
            calibration=self.calibration and {**self.calibration, **calibration},
            provenance={**self.provenance, "compute_dtype": compute_dtype, **compared},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict."""
        return {
            "ratio": self.ratio,
            "effective_ratio": self.effective_ratio,
            "model_ratio": self.model_ratio,
            "model_parameters": self.model_parameters,
            "svd_config": self.config and self.config.to_dict(),
            "layers": [layer.to_dict() for layer in self.layers],
            "left_dense": [asdict(left) for left in self.left_dense],
            "narrowed": self.narrowed and asdict(self.narrowed),
            "calibration": self.calibration,
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote, checking every value.

        Raises:
            ValueError: a field is missing, of the wrong type or out of range.
        """
        try:
            config, layers = values["svd_config"], values["layers"]
            calibration, provenance = values["calibration"], values["provenance"]
        except KeyError as error:
            raise ValueError(f"compression record must have a field {error}") from None
        parameters, left_dense = values.get("model_parameters"), values.get("left_dense", [])
        if not isinstance(config, (Mapping, type(None))):
            raise ValueError(f"svd_config must be an object or null, got {config!r}")
        if not isinstance(layers, list) or not layers:
            raise ValueError("compression record must list at least one layer")
        if not isinstance(left_dense, list):
            raise ValueError(f"left_dense must be a list, got {left_dense!r}")
        if not isinstance(calibration, (dict, type(None))) or not isinstance(provenance, dict):
            raise ValueError("calibration must be an object or null, and provenance an object")
        if not (parameters is None or is_count(parameters)):
            raise ValueError(f"model_parameters must be a positive integer, got {parameters!r}")
        try:
            config = None if config is None else SVDConfig.from_dict(config)
            read = tuple(LayerReport.from_dict(layer) for layer in layers)
        except TypeError as error:
            raise ValueError(f"compression record is malformed: {error}") from None
        name, count = Counter(layer.name for layer in read).most_common(1)[0]
        if count > 1:
            raise ValueError(f"each layer must be listed once, got {name} {count} times")
        left = tuple(map(LeftDense.from_dict, left_dense))
        narrowed = values.get("narrowed")
        narrowed = None if narrowed is None else NarrowedMLPs.from_dict(narrowed)
        return cls(config, read, calibration, provenance, parameters, left, narrowed)


def provenance_of(model: nn.Module) -> dict[str, str]:
    """Return the model's id, as its config names it, and the versions the factors depend on."""
    return {
        "model": str(getattr(model, "name_or_path", "")),
        "neuronmm_ops": version("neuronmm-ops"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def is_count(value: object) -> bool:
    """Say whether a value of a document is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

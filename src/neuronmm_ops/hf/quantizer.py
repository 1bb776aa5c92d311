"""The HfQuantizer that makes `from_pretrained` restore a compressed checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuronmm_ops.checkpoint import check_float, check_tensors, read_config, read_headers
from neuronmm_ops.compress.record import QUANT_METHOD, compressed_layers, record_of, report_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.compress.targets import names_in
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.loading import check_can_divide, check_values, is_divided, model_names
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.dense_linear import dense_linear
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.swap import replace_


class NeuronMMConfig(QuantizationConfigMixin):
    """A compression record in the place where Transformers keeps quantization configs.

    Raises:
        CheckpointError: the record is not ours, of an unknown version, or malformed.
    """

    def __init__(self, **record: Any) -> None:
        self.report: CompressionReport = report_of(record)
        self.quant_method = QUANT_METHOD  # pyright: ignore  (an enum of Transformers' methods)

    def to_dict(self) -> dict[str, Any]:
        """Return the record, as config.json holds it."""
        return record_of(self.report)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: Transformers copies a config several times a load, layer by layer."""
        return self  # a report is frozen


class NeuronMMQuantizer(HfQuantizer):
    """Puts compressed layers and `SVDMLP`s on `meta` in place before the weights are read."""

    def __init__(self, config: QuantizationConfigMixin, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        assert isinstance(config, NeuronMMConfig)
        self.report = config.report
        if not self.pre_quantized:
            raise ValueError(
                "from_pretrained restores compressed checkpoints, it does not compress; "
                "use compress_ or: neuronmm compress"
            )

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        layers = _by_name(model, self.report.layers)
        replace_(
            model,
            {n: _meta_layer(model, n, layer) for n, layer in layers.items() if layer.is_replaced},
        )
        if is_divided(model):
            _tensor_parallel().plan_(model)
        if checkpoint_files is not None:
            # Transformers would re-initialize tensors that do not fit, with a warning.
            read_config(Path(checkpoint_files[0]).parent)  # refuses weights of other files
            headers = read_headers(Path(file) for file in checkpoint_files)
            named = {name: headers[key] for key, name in model_names(model, headers).items()}
            check_tensors(named, [replace(each, name=name) for name, each in layers.items()])
            check_float(headers)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        if is_divided(model):
            _tensor_parallel().finish_(model)
        for layer in compressed_layers(model).values():
            if layer.storage is not None:  # the loader lets every float ask for gradients
                for matrix, _ in layer.scaled():
                    matrix.requires_grad_(False)
        if not is_divided(model):
            check_values(model, "copy the checkpoint again or compress the model again")
        # Transformers neither trains nor casts a model with this flag.
        model.is_quantized = False  # pyright: ignore  (not declared)
        return model

    def get_state_dict_and_metadata(  # pyright: ignore  (the base's stub returns None)
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Put a model together that ranks have divided, on the first of them; all must call."""
        return (_tensor_parallel().gathered_state(model) if is_divided(model) else None), {}

    def is_serializable(self) -> bool:  # pyright: ignore  (the base's stub returns None)
        """Say that `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore  (the base's stub returns None)
        """Say that training works: of the factors, or of adapters on top of those in one byte."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Say that `torch.compile` works: the ops have fakes."""
        return True


def _tensor_parallel() -> Any:
    """Return the module, whose import needs a newer Transformers than the rest.

    Raises:
        ImportError: it is older.
    """
    check_can_divide()
    return import_module("neuronmm_ops.hf.tensor_parallel")


AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = NeuronMMConfig  # pyright: ignore  (a subclass)
register_quantizer(QUANT_METHOD)(NeuronMMQuantizer)


def _by_name(model: PreTrainedModel, layers: Iterable[LayerReport]) -> dict[str, LayerReport]:
    """Return the layers by their names in the model."""
    modules = {name for name, _ in model.named_modules()}
    named: dict[str, LayerReport] = {}
    for layer in layers:
        name = next((name for name in names_in(model, layer.name) if name in modules), None)
        if name is None:
            raise CheckpointError(
                f"config.json lists layer {layer.name}, which {type(model).__name__} does not have"
            )
        named[name] = layer
    return named


def _meta_layer(model: PreTrainedModel, name: str, layer: LayerReport) -> CompressedLinear:
    module = model.get_submodule(name)
    linear = dense_linear(module)
    if linear is None:
        raise CheckpointError(f"{name} must be an nn.Linear, got {type(module).__name__}")
    if (linear.in_features, linear.out_features) != (layer.K, layer.N):
        raise CheckpointError(
            f"{name}: config.json asks for [K, N] = {[layer.K, layer.N]}, the architecture has "
            f"{[linear.in_features, linear.out_features]}"
        )
    has_bias, dtype = linear.bias is not None, linear.weight.dtype
    if layer.r is None:
        assert layer.storage is not None
        made = StoredLinear(layer.K, layer.N, layer.storage, has_bias, "meta", dtype)
    else:
        made = SVDLinear(layer.K, layer.N, layer.r, has_bias, "meta", dtype, layer.storage)
    made.compute = layer.compute
    return made

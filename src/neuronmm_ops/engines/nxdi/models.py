"""NxD Inference's causal LMs for compressed checkpoints, as subclasses. Imports NxD when asked.

`NeuronSVDLlamaForCausalLM` and the like are made when they are first asked for.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from neuronmm_ops.checkpoint import inspect_checkpoint, read_config
from neuronmm_ops.compress.record import is_record
from neuronmm_ops.engines.nxdi.convert import put_pairs, take_pairs
from neuronmm_ops.engines.nxdi.record import check_options, divide_of, low_rank_layers
from neuronmm_ops.manifest import check_weights

# By `model_type`: the family's name in NxD Inference's classes and modules.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@cache
def causal_lm(model_type: str) -> Any:
    """Return the class for a family: NxD Inference's own, with low-rank layers where recorded.

    It is used as NxD Inference's: `causal_lm("llama")(directory, config)`, then `compile`, `load`.
    For a model that is not compressed it is the same as that class.

    Args:
        model_type: of config.json: `llama`, `mistral`, `qwen2` or `qwen3`.

    Raises:
        ValueError: the family is unknown.
        ImportError: NxD Inference is not installed.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}; "
            "other families of NxD Inference have MLPs of their own"
        )
    family = FAMILIES[model_type]
    path = f"neuronx_distributed_inference.models.{model_type}.modeling_{model_type}"
    dense = getattr(import_module(path), f"Neuron{family}ForCausalLM")
    dense_model = dense._model_cls

    def init_model(self: Any, config: Any) -> None:
        dense_model.init_model(self, config)
        _compress_layers(self.layers, config)

    def convert(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
        check_options(config)
        layers, options = low_rank_layers(config), config.neuron_config
        pairs = take_pairs(state_dict, layers, options.torch_dtype)
        converted = dense.convert_hf_to_neuron_state_dict(state_dict, config)
        put_pairs(converted, pairs, layers, options.tp_degree, divide_of(config))
        return converted

    def get_state_dict(cls: Any, model_name_or_path: str, config: Any) -> dict[str, Any]:
        directory = Path(model_name_or_path)
        if low_rank_layers(config) and directory.is_dir():
            _check_directory(directory)
        return dense.get_state_dict.__func__(cls, model_name_or_path, config)

    def validate_config(cls: Any, config: Any) -> None:
        dense.validate_config.__func__(cls, config)
        check_options(config)

    model = _subclass(dense_model, family, "Model", {"init_model": init_model})
    members = {
        "_model_cls": model,
        "convert_hf_to_neuron_state_dict": staticmethod(convert),
        "get_state_dict": classmethod(get_state_dict),
        "validate_config": classmethod(validate_config),
    }
    return _subclass(dense, family, "ForCausalLM", members)


def register(model_types: dict[str, dict[str, Any]] | None = None) -> None:
    """Put the classes in the place of NxD Inference's own, where its tools look a model up.

    Args:
        model_types: classes by task by family, changed in place; default that of
            `neuronx_distributed_inference.utils.constants`, which vLLM's plugin for NxD Inference
            reads. `inference_demo` has one of its own. Families that it does not have are left out.

    Raises:
        ImportError: NxD Inference is not installed.
    """
    if model_types is None:
        constants = import_module("neuronx_distributed_inference.utils.constants")
        return register(constants.MODEL_TYPES)
    for model_type in FAMILIES:
        if model_type in model_types:
            model_types[model_type]["causal-lm"] = causal_lm(model_type)
    return None


def __getattr__(name: str) -> Any:
    """Give a class by its name, by which NxD Inference's saved configs ask for it."""
    for model_type, family in FAMILIES.items():
        if name == f"NeuronSVD{family}ForCausalLM":
            return causal_lm(model_type)
        if name == f"NeuronSVD{family}Model":
            return causal_lm(model_type)._model_cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _subclass(base: Any, family: str, kind: str, members: dict[str, Any]) -> Any:
    return type(f"NeuronSVD{family}{kind}", (base,), {"__module__": __name__, **members})


def _compress_layers(layers: Any, config: Any) -> None:
    from neuronmm_ops.engines.nxdi.layers import compress_layer

    recorded, divide = low_rank_layers(config), divide_of(config)
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        own = {
            name.removeprefix(prefix): entry.r
            for name, entry in recorded.items()
            if name.startswith(prefix) and entry.r is not None
        }
        if own:
            compress_layer(layer, own, divide)


def _check_directory(directory: Path) -> None:
    """Refuse weights that do not fit their record, or are not what the manifest says."""
    if is_record(read_config(directory).get("quantization_config")):
        inspect_checkpoint(directory)
        check_weights(directory, values=True)

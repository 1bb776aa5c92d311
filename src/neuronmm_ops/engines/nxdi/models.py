"""Causal LMs of engines on NxD for compressed checkpoints, as subclasses. Imports NxD when asked.

`NeuronSVDLlamaForCausalLM` and the like are made when they are first asked for.
"""

import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.checkpoint import inspect_checkpoint, read_config
from neuronmm_ops.compress.record import is_record
from neuronmm_ops.engines.nxdi.record import (
    as_engine_state,
    check_draft,
    check_options,
    divide_of,
    served_layers,
)
from neuronmm_ops.engines.places import COLUMNS
from neuronmm_ops.extras import version_of
from neuronmm_ops.manifest import check_weights

# By `model_type`: the family's name in the engines' classes and modules.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class NxdEngine(NamedTuple):
    """An engine on NxD.

    Attributes:
        package: the distribution's name.
        models: the module of a family.
        name: of its causal LM.
        families: by `model_type`.
        tested: the beginnings of the versions that were.
    """

    package: str
    models: str
    name: str
    families: tuple[str, ...]
    tested: tuple[str, ...]


NXDI = NxdEngine(
    "neuronx-distributed-inference",
    "neuronx_distributed_inference.models.{0}.modeling_{0}",
    "Neuron{}ForCausalLM",
    tuple(FAMILIES),
    ("0.9.",),
)
OPTIMUM = NxdEngine(
    "optimum-neuron",
    "optimum.neuron.models.inference.{0}.modeling_{0}",
    "{}NxDModelForCausalLM",
    ("llama", "qwen2", "qwen3"),
    ("0.4.6",),
)
# What the classes below replace, as every tested version has it.
_METHODS = {
    "convert_hf_to_neuron_state_dict": ("state_dict", "config"),
    "get_state_dict": (None, "config"),
}


@cache
def causal_lm(model_type: str, engine: NxdEngine = NXDI) -> Any:
    """Return the class for a family: the engine's own, with low-rank layers where recorded.

    It is used as NxD Inference's: `causal_lm("llama")(directory, config)`, then `compile`, `load`.
    For a model that is not compressed it is the same as that class.

    Args:
        model_type: of config.json: `llama`, `mistral`, `qwen2` or `qwen3`.
        engine: NxD Inference by default.

    Raises:
        ValueError: the family is unknown.
        ImportError: the engine is not installed, or its classes are others than those tested.
    """
    if model_type not in engine.families:
        raise ValueError(
            f"model_type must be one of {', '.join(engine.families)}, got {model_type!r}; "
            f"other families of {engine.package} have MLPs of their own"
        )
    family = FAMILIES[model_type]
    module = import_module(engine.models.format(model_type))
    dense = getattr(module, engine.name.format(family))
    _check_version(engine, dense)
    dense_model = dense._model_cls

    # NxD Inference wraps what adapters adapt after `init_model`.
    built_by = "init_model" if hasattr(dense_model, "init_model") else "__init__"

    def build(self: Any, config: Any, *rest: Any, **options: Any) -> None:
        getattr(dense_model, built_by)(self, config, *rest, **options)
        _compress_layers(self.layers, config, self.neuron_config)

    def convert(state_dict: dict[str, Tensor], config: Any, *rest: Any) -> dict[str, Tensor]:
        options = rest[0] if rest else config.neuron_config
        layers = served_layers(config, options)
        if not layers:
            return dense.convert_hf_to_neuron_state_dict(state_dict, config, *rest)
        check_options(config, options)
        as_engine_state(state_dict, config, options)
        kept = _hidden(state_dict, layers)
        converted = dense.convert_hf_to_neuron_state_dict(state_dict, config, *rest)
        converted.update(kept)
        return converted

    def get_state_dict(cls: Any, path: str, config: Any, *rest: Any) -> dict[str, Tensor]:
        directory = Path(path)
        if served_layers(config, *rest) and directory.is_dir():
            _check_directory(directory)
        return dense.get_state_dict.__func__(cls, path, config, *rest)

    def validate_config(cls: Any, config: Any) -> None:
        dense.validate_config.__func__(cls, config)
        check_options(config)
        speculation = getattr(config, "fused_spec_config", None)
        if speculation is not None:
            check_draft(speculation.draft_config, config)

    def create_graph_builders(cls: Any, config: Any, neuron_config: Any) -> Any:
        check_options(config, neuron_config)
        return dense.create_graph_builders.__func__(cls, config, neuron_config)

    model = _subclass(dense_model, family, "Model", {built_by: build})
    members: dict[str, Any] = {
        "_model_cls": model,
        "convert_hf_to_neuron_state_dict": staticmethod(convert),
        "get_state_dict": classmethod(get_state_dict),
    }
    checked: tuple[Any, ...] = (validate_config, create_graph_builders)
    for method in checked:  # before anything is compiled
        if hasattr(dense, method.__name__):
            members[method.__name__] = classmethod(method)
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
    for model_type in NXDI.families:
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


def _check_version(engine: NxdEngine, dense: Any) -> None:
    """Warn of a version that was not tested; refuse one whose classes are others."""
    version = version_of(engine.package)
    for name, expected in _METHODS.items():
        parameters = (
            tuple(signature(getattr(dense, name)).parameters) if hasattr(dense, name) else ()
        )
        if len(parameters) < len(expected) or any(
            want not in (None, have) for want, have in zip(expected, parameters, strict=False)
        ):
            raise ImportError(
                f"{dense.__name__}.{name} of {engine.package} {version} has the parameters "
                f"{parameters}, which this package does not know; install "
                f"{' or '.join(engine.tested)}x"
            )
    if version is not None and not version.startswith(engine.tested):
        warnings.warn(
            f"{engine.package} {version} was not tested, {' and '.join(engine.tested)}x were; "
            "its classes fit, so it is used",
            stacklevel=3,
        )


def _hidden(state: dict[str, Tensor], layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take out, and leave empty, what the engine would fuse of attention with low-rank layers."""
    kept: dict[str, Tensor] = {}
    names = COLUMNS["self_attn"]
    blocks = {name.rpartition(".")[0] for name in layers if name.endswith(names)}
    for name in [f"{block}.{leaf}" for block in blocks for leaf in names]:
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in state:
                kept[key], state[key] = state[key], torch.empty(0)
    return kept


def _compress_layers(layers: Any, config: Any, options: Any) -> None:
    from neuronmm_ops.engines.nxdi.layers import compress_layer

    recorded, divide = served_layers(config, options), divide_of(config, options)
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        of_layer = {n.removeprefix(prefix): r for n, r in recorded.items() if n.startswith(prefix)}
        if of_layer:
            compress_layer(layer, of_layer, divide, config.hidden_act)


def _check_directory(directory: Path) -> None:
    """Refuse weights that do not fit their record, or are not what the manifest says."""
    if is_record(read_config(directory).get("quantization_config")):
        inspect_checkpoint(directory)
        check_weights(directory, values=True)

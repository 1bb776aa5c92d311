"""Loading models strictly: what Transformers only warns about is an error here."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from neuronmm_ops.checkpoint import check_float, read_config, read_headers, weight_files
from neuronmm_ops.compress.factorize import is_finite
from neuronmm_ops.compress.record import compressed_layers, is_record
from neuronmm_ops.errors import CheckpointError, NonFiniteError, WorkerLostError
from neuronmm_ops.manifest import check_weights
from neuronmm_ops.models import HUB_ID
from neuronmm_ops.ops.backends.cpu import name_of

# The first Transformers whose plans cut DTensors.
OLDEST_DIVIDING = "5.16"
# The files of a model but its code and its weights in other formats.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
MAX_REASON = 300


def load(
    model: str | Path,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    tp: int = 1,
    verify: bool = False,
) -> PreTrainedModel:
    """Load a causal LM, dense or compressed, in eval mode; one that reads images or sound, whole.

    Args:
        model: a Transformers model directory with safetensors, or a hub id such as `org/name`.
        dtype: of the parameters; `auto` takes the checkpoint's.
        device_map: as in `from_pretrained`.
        tp: processes, all that `torchrun` has started, that divide the model among them by its
            tensor-parallel plan.
        verify: compare the values of all tensors with the SHA-256 in `manifest.json`, where there
            is one; of several processes the first does. It is off by default: hashing takes about
            0.5 s a GB and core, with a CPU's SHA instructions, twice as long as loading, and even
            a CRC-32 0.16 s. Then sizes and headers of the files alone are compared.
            `load_computing` and the commands verify.

    Raises:
        WorkerLostError: another of these processes has ended.
        CheckpointError: files are missing, damaged, malformed or not what `manifest.json` says,
            the model is an encoder-decoder,
            or its parameters are not exactly those in the files (Transformers would draw missing
            ones at random, and leave others out, with a warning), or numbers in one byte or their
            scales hold what they must not.
        ImportError: tp is more than 1, and Transformers is too old for that.
        NonFiniteError: a parameter is NaN or Inf.
    """
    path = local_directory(model)
    config = read_config(path)
    if config.get("is_encoder_decoder") is True:
        raise CheckpointError(
            f"{model} is an encoder-decoder; only decoders (causal language models) are supported"
        )
    files, entry = weight_files(path), config.get("quantization_config")
    if not is_record(entry):  # NeuronMMQuantizer reads those of compressed checkpoints
        headers = read_headers(files)
        if entry is None:
            check_float(headers)
    options: dict[str, Any] = {"dtype": dtype, "device_map": device_map}
    if tp > 1:
        options["distributed_config"] = _distributed_config(tp)
    try:
        loaded, info = load_exactly(auto_class(_config(path)), path, **options)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from None
    except (CheckpointError, NonFiniteError, WorkerLostError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a bad config makes constructors raise anything
        raise CheckpointError(
            f"{path} cannot be loaded: {reason(error)}; check its config.json"
        ) from error
    _check_keys(path, config, loaded, info)
    check_weights(path, values=verify and (tp == 1 or torch.distributed.get_rank() == 0))
    if not is_record(entry):  # NeuronMMQuantizer does for its own
        remedy = "copy the checkpoint again"
        if is_divided(loaded):
            import_module("neuronmm_ops.hf.tensor_parallel").check_parts(loaded, remedy)
        else:
            check_values(loaded, remedy)
    return loaded


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of Transformers that makes a config's model, with all that it reads.

    Raises:
        CheckpointError: there is none.
    """
    kind, named = type(config), (config.architectures or [None])[0]
    reads_more: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(kind, None)
    reads_text = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    if reads_more is not None and (reads_text is None or reads_more.__name__ == named):
        return AutoModelForMultimodalLM
    if reads_text is None:
        raise CheckpointError(
            f"Transformers {transformers.__version__} has no language model of the model_type "
            f"{config.model_type}; use the version that the model's config.json names"
        )
    return AutoModelForCausalLM


def _config(path: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_exactly(kind: Any, path: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Call `kind.from_pretrained` on a local directory; return the model and its loading info."""
    return kind.from_pretrained(
        path,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )


@torch.no_grad()
def empty_model(path: Path) -> PreTrainedModel:
    """The dense model of a local directory's config, without values.

    Raises:
        CheckpointError: there is none.
    """
    try:
        config: Any = _config(path)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return auto_class(config).from_config(config)
    except CheckpointError:
        raise
    except Exception as error:  # a bad config makes constructors raise anything
        raise CheckpointError(
            f"{path} cannot be loaded: {reason(error)}; check its config.json"
        ) from error


def check_values(model: PreTrainedModel, remedy: str) -> None:
    """Refuse values that are not finite, and one-byte numbers or scales that cannot be.

    Values on the meta device are not looked at.

    Raises:
        NonFiniteError: a parameter or a saved buffer, dense ones too, holds NaN or Inf.
        CheckpointError: a one-byte factor or a scale holds what it must not.
    """
    for name, layer in compressed_layers(model).items():
        if layer.storage is not None:
            try:
                layer.check_values(name)
            except ValueError as error:
                raise CheckpointError(f"{error}; or {remedy}") from None
    names: dict[Tensor, str] = {}  # what is tied is read once
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    check_all_finite(((name, tensor) for tensor, name in names.items()), remedy)


def check_all_finite(tensors: Iterable[tuple[str, Tensor]], remedy: str) -> None:
    """Raise NonFiniteError that names the first tensor with NaN or Inf."""
    for name, tensor in tensors:
        if not is_finite(tensor):
            dtype = name_of(tensor.dtype)
            raise NonFiniteError(f"{name} must be finite in {dtype}, got NaN or Inf; {remedy}")


def load_tokenizer(model: str | Path) -> Any:
    """Load the tokenizer of a model directory, or of a hub id.

    Raises:
        CheckpointError: the directory has none that is usable.
    """
    path = local_directory(model)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # bad files make tokenizers raise anything
        is_malformed = isinstance(error, (AttributeError, TypeError, LookupError))
        what = "one of its files is malformed" if is_malformed else reason(error)
        raise CheckpointError(
            f"{path} has no usable tokenizer ({what}); copy the model's tokenizer files into it"
        ) from error


def check_vocabulary(
    models: Sequence[str | Path], tokenizers: Sequence[Any], otherwise: str
) -> None:
    """Refuse models whose tokenizers have another vocabulary than the first's.

    Args:
        models: directories or hub ids, for the error.
        tokenizers: of each.
        otherwise: what follows where they differ, for the error.

    Raises:
        CheckpointError: names the model, and a token of the difference.
    """
    expected = tokenizers[0].get_vocab()
    for model, tokenizer in zip(models[1:], tokenizers[1:], strict=True):
        differing = sorted(token for token, _ in expected.items() ^ tokenizer.get_vocab().items())
        if differing:
            raise CheckpointError(
                f"{model} must have the vocabulary of {models[0]}, they differ in "
                f"{len(set(differing))} tokens, such as {differing[0]!r}; {otherwise}"
            )


def is_divided(model: PreTrainedModel) -> bool:
    """Say whether a model is divided between ranks, or about to be."""
    config = getattr(model.config, "distributed_config", None)
    sizes = getattr(config, "tp_size", None), getattr(model, "_tp_size", None)
    return max(size or 1 for size in sizes) > 1


def model_names(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Map the keys of a checkpoint to the names that Transformers' loader gives them in `model`.

    Keys whose tensors the loader merges or splits, such as single experts', are left out.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    names: dict[str, str] = {}
    for key in keys:
        name, merged = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            names[key] = key
        elif merged is None:
            names[key] = name
    return names


def local_directory(model: str | Path) -> Path:
    """Return the directory of a model, downloading a hub id into the hub's cache."""
    path = Path(model)
    if path.exists() or isinstance(model, Path) or not HUB_ID.fullmatch(model):
        return path
    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES), ignore_patterns="*/*"))
    except (LocalEntryNotFoundError, ConnectionError) as error:
        problem = f"the hub cannot be reached ({reason(error)})"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        problem = f"the hub does not give it ({reason(error)})"
    raise CheckpointError(
        f"{model} is no directory, and {problem}; give a local Transformers model directory"
    )


def check_can_divide() -> None:
    """Refuse a Transformers whose plans do not cut DTensors.

    Raises:
        ImportError: it is older.
    """
    if find_spec("transformers.distributed.tensor_parallel") is None:
        raise ImportError(
            f"tensor parallelism needs transformers>={OLDEST_DIVIDING}, got "
            f"{transformers.__version__}; run: pip install -U transformers"
        )


def _distributed_config(tp: int) -> Any:
    """Return what `from_pretrained` takes to divide a model by its plan."""
    check_can_divide()
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_size=tp, tp_plan="auto")


def _check_keys(
    path: Path, config: dict[str, Any], model: PreTrainedModel, info: dict[str, Any]
) -> None:
    """Refuse a checkpoint that lacks tensors of the model, or has others."""
    kind, named = type(model).__name__, config.get("architectures")
    hint = "config and weights are not of the same checkpoint"
    if isinstance(named, list) and named and named[0] != kind:
        hint = f"the checkpoint is of a {named[0]}"
    for keys, problem in (
        (info["missing_keys"], f"lacks {{}} of the tensors of {kind}"),
        (info["unexpected_keys"], f"has {{}} tensors that {kind} has no place for"),
    ):
        if keys:
            described = problem.format(len(keys))
            raise CheckpointError(f"{path} {described}, first {sorted(keys)[0]}; {hint}")


def reason(error: Exception) -> str:
    """An error in one line, shortened, with its type where it may be no sentence."""
    line = " ".join(str(error).split())
    known = type(error) in (OSError, ValueError, RuntimeError)
    line = line if known and line else f"{type(error).__name__}: {line}"
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."

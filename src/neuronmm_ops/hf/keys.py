"""The names of tensors in a checkpoint and in its model; Transformers renames some on loading."""

from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


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

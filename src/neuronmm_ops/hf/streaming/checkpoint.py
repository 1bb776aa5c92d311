"""A model whose values stay on disk until they are asked for."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from neuronmm_ops.checkpoint import read_headers, weight_files
from neuronmm_ops.compress.factorize import is_finite
from neuronmm_ops.compress.targets import output_head
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.hf.loading import auto_class, load, model_names


class Checkpoint:
    """A dense checkpoint, and its model without values.

    Args:
        directory: a Transformers directory with safetensors.

    Attributes:
        directory: as given.
        headers: of the stored tensors, by key.
        model: the causal LM in eval mode, in the checkpoint's dtype: parameters and saved buffers
            on the meta device, others (RoPE's angles) on the CPU.

    Raises:
        CheckpointError: as `hf.load`.
        ValueError: Transformers makes one tensor of several.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The caller hashes the files after this; from here on they must stay as they are.
        self._versions = {file: _version(file) for file in weight_files(directory)}
        self.headers = read_headers(weight_files(directory))
        self.model = load(directory, device_map="meta")
        self._fill_unsaved_buffers()
        self._stored = self.model.state_dict(keep_vars=True)
        self._aliases = self._find_aliases()
        self._changes: dict[str, Callable[[Tensor], Tensor]] = {}
        keys = {name: key for key, name in model_names(self.model, self.headers).items()}
        self._keys: dict[str, str] = {}
        for name, names in self._aliases.items():
            key = next((keys[n] for n in (name, *names) if n in keys), None)
            if key is None:
                raise ValueError(
                    f"{directory}: {name} is made of several stored tensors, as single experts "
                    "are, or of a part of one; such a model cannot be streamed, compress it "
                    "without --stream"
                )
            self._keys[name] = key

    def read(self, name: str) -> Tensor:
        """Return a parameter or saved buffer in the model's dtype; memory may be mapped.

        Raises:
            CheckpointError: its file is gone, or is not what it was.
        """
        return self._value(name).to(self._stored[name].dtype)

    def change(self, name: str, by: Callable[[Tensor], Tensor]) -> None:
        """Let a tensor that is not tied be, from here on, what is made of the stored one."""
        self._changes[name] = by

    def _value(self, name: str) -> Tensor:
        """Return a stored tensor in the model's dtype, or what it was changed to."""
        key = self._keys[name]
        header = self.headers[key]
        try:
            if _version(header.file) != self._versions[header.file]:
                raise CheckpointError(
                    f"{header.file} has been changed since this run began; put back the file that "
                    "was there before and run the same command again"
                )
            with safe_open(header.file, framework="pt") as tensors:
                tensor: Tensor = tensors.get_tensor(key)
        except (OSError, SafetensorError) as error:
            reason = "is gone" if not header.file.exists() else f"cannot be read ({error})"
            raise CheckpointError(
                f"{header.file} {reason}; put it back and run the same command again, "
                "what is done so far is kept"
            ) from None
        tensor = tensor.to(self._stored[name].dtype)
        change = self._changes.get(name)
        return tensor if change is None else change(tensor)

    def check_finite(self, dtype: torch.dtype) -> None:
        """Read all tensors; raise NonFiniteError where one is NaN or Inf, parameters in `dtype`."""
        for name in self.names():
            is_parameter = isinstance(self._stored[name], nn.Parameter)
            if not is_finite(self.read(name).to(dtype if is_parameter else None)):
                layer, _, leaf = name.rpartition(".")
                raise NonFiniteError(
                    f"{layer}: {leaf} must be finite, got NaN or Inf; the checkpoint is damaged"
                )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        return self._stored[name].dtype

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of stored tensors under a prefix, tied ones once."""
        aliases: set[str] = set()
        names: list[str] = []
        for name in self._keys:
            if name.startswith(prefix) and name not in aliases:
                names.append(name)
                aliases |= {name, *self._aliases[name]}
        return names

    def ends(self) -> set[str]:
        """Return the names of what only token ids and logits need: embedding and output head."""
        modules = (self.model.get_input_embeddings(), output_head(self.model))
        held = {id(p) for module in modules if module is not None for p in module.parameters()}
        return {name for name, tensor in self._stored.items() if id(tensor) in held}

    @contextmanager
    def filled(
        self, names: Iterable[str], dtype: torch.dtype, device: torch.device
    ) -> Generator[None]:
        """Give the named tensors their values for a block, those of floats in `dtype`."""
        before: dict[str, Tensor] = {}
        try:
            for name in names:
                tensor = self._value(name)
                tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
                if isinstance(self._stored[name], nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=False)
                for alias in (name, *self._aliases[name]):
                    before[alias] = self._replace(alias, tensor)
            yield
        finally:
            for name, tensor in before.items():
                self._replace(name, tensor)

    def _find_aliases(self) -> dict[str, list[str]]:
        """Map the name of each saved tensor to its other names: tied weights have several."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self._stored.items():
            groups.setdefault(id(tensor), []).append(name)
        return {
            name: [n for n in names if n != name] for names in groups.values() for name in names
        }

    def _fill_unsaved_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds, as the model's constructor does."""
        with init_empty_weights(include_buffers=False):
            twin = auto_class(self.model.config).from_config(
                self.model.config, dtype=self.model.dtype
            )
        for name, module in self.model.named_modules():
            for leaf in module._non_persistent_buffers_set:
                module._buffers[leaf] = twin.get_submodule(name)._buffers[leaf]

    def _replace(self, name: str, tensor: Tensor) -> Tensor:
        """Put a tensor into the model, and return the one that was there."""
        parent, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(parent)
        store: dict[str, Any] = (
            module._parameters if leaf in module._parameters else module._buffers  # pyright: ignore
        )
        before, store[leaf] = store[leaf], tensor
        return before


def _version(file: Path) -> tuple[int, ...]:
    """Return what changes where a file is written again, or is another one."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

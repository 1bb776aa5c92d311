"""A layer of Transformers' StaticCache as `neuronmm::decoder_layer` reads and writes it.

Transformers allots every sequence of a batch the same places, those of left padding included, and
hides some of them by a mask. The op has a position a sequence instead. So once a prompt has been
read, each sequence is moved to the left by its padding.
"""

from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.laid_linear import BY_STRIDES
from neuronmm_ops.ops.definitions.attention import has_values

_KINDS = ("StaticLayer", "StaticSlidingWindowLayer")
_NAME, _NAME_BEFORE = "cache", "past_key_values"
"""Of the argument and of an output's field, in Transformers from 5.24 on and before."""


class DecodeCache:
    """How a layer of a StaticCache lies for the op, kept as that layer's `decode_cache`.

    Keys stay `[B, kv_heads, T, head_dim]` for Transformers, but become a view of
    `[B, kv_heads, head_dim, T]`. Where views have buffers of their own, as on XLA, the same buffer
    holds them in that order from a prompt until Transformers' modules run again.

    Args:
        layer: Transformers' `StaticLayer` or `StaticSlidingWindowLayer`.

    Attributes:
        filled: whether a prompt has been read since the last reset.
        padding: int64 `[B]`, places by which each sequence has been moved to the left.
        reordered: whether the keys' buffer is in another order than its shape says.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.filled = False
        self.reordered = False
        self.padding: Tensor | None = None

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values as the op takes them."""
        keys: Tensor = self.layer.keys
        B, kv, T, d = keys.shape
        return [keys.view(B, kv, d, T) if self.reordered else keys.mT, self.layer.values]

    def takes(self, new: int) -> bool:
        """Say whether `advance` has places for new tokens; a full window drops one at a time."""
        return self.filled and (new == 1 or not self._is_full(new))

    def _is_full(self, new: int) -> bool:
        """Say whether a window must drop tokens for new ones."""
        return (
            self.layer.is_sliding
            and self.layer.cumulative_length_int + new > self.layer.max_cache_len
        )

    def advance(self, new: int) -> Tensor:
        """Return the place of each sequence's first new token, int32 `[B]`, and count them."""
        self._lay_out()
        assert self.padding is not None  # it is filled
        if self._is_full(new):
            self._move((new - self.padding).clamp_min(0))
            self.padding.sub_(new).clamp_min_(0)
            first: Tensor | int = self.layer.max_cache_len - new
        else:
            first = self.layer.cumulative_length.clone()
            self.layer.cumulative_length.add_(new)
        if self.layer.is_sliding:
            self.layer.cumulative_length_int += new
        return (first - self.padding).to(torch.int32)

    def restore(self) -> None:
        """Move sequences to where Transformers has them, for a forward of its modules."""
        if self.filled and self.padding is not None:
            self._move(-self.padding)
        self.filled = False
        if self.reordered:
            self.layer.keys.copy_(self.caches[0].mT.contiguous())
            self.reordered = False

    def take(self, mask: Any) -> None:
        """Move each sequence to the left by its padding, after a forward of Transformers' modules.

        Args:
            mask: as that forward had it: None, `[B, tokens]`, or `[B, 1, M, places]`, either
                boolean or added to scores.

        Raises:
            ValueError: the mask hides tokens between others, or after them.
        """
        self._lay_out()
        padding = self._padding(mask).expand(len(self.layer.keys)).contiguous()
        self._move(padding)
        if self.padding is None or self.padding.shape != padding.shape:
            self.padding = padding
            _mark_static(padding)
        else:
            self.padding.copy_(padding)
        self.filled = True

    def _padding(self, mask: Any) -> Tensor:
        """Return the places before each sequence, which a mask hides, `[B]` or `[]`."""
        if mask is None:
            return torch.zeros_like(self.layer.cumulative_length)
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"fused decoder layers read padding from a tensor, got {type(mask).__name__}; load "
                "the model with attn_implementation='sdpa'"
            )
        row = mask[:, 0, -1] if mask.dim() == 4 else mask.bool()
        is_token = row if row.dtype == torch.bool else row >= 0
        first, size = is_token.int().argmax(-1), is_token.shape[-1]
        end = size if self._is_full(1) else self.layer.cumulative_length
        if has_values(is_token) and bool((is_token.sum(-1) != end - first).any()):
            raise ValueError(
                "fused decoder layers take padding before a prompt alone, got a mask that hides "
                "other tokens; pad on the left, or unfuse_ the model"
            )
        return (first - max(size - self.layer.max_cache_len, 0)).clamp_min(0)

    def _move(self, places: Tensor) -> None:
        """Move each sequence to the left by so many places, round the end; `[B]` or `[]`."""
        if has_values(places) and not bool(places.any()):
            return
        keys, values = self.caches
        T = values.shape[2]
        sources = (torch.arange(T, device=places.device) + places.unsqueeze(-1)) % T
        for tensor in (keys.mT, values):
            index = sources.expand(len(tensor), T)[:, None, :, None].expand_as(tensor)
            tensor.copy_(tensor.gather(2, index))

    def _lay_out(self) -> None:
        """Let keys lie as `[B, kv_heads, head_dim, T]`."""
        keys: Tensor = self.layer.keys
        if keys.device.type not in BY_STRIDES:
            if not self.reordered:
                keys.copy_(keys.mT.contiguous().view_as(keys))
                self.reordered = True
        elif not self.layer.keys.mT.is_contiguous():
            self.layer.keys = self.layer.keys.mT.contiguous().mT
            _mark_static(self.layer.keys)


def _reset(layer: Any) -> None:
    """Forget all tokens of a layer of a StaticCache."""
    type(layer).reset(layer)
    layer.decode_cache.filled = layer.decode_cache.reordered = False


def decode_cache(past: Any, number: int) -> DecodeCache | None:
    """Return the `DecodeCache` of a layer of a StaticCache; None of another cache without tokens.

    Raises:
        TypeError: another cache has tokens, or the cache is offloaded.
    """
    layer: Any = past.layers[number] if number < len(past.layers) else None
    if hasattr(layer, "decode_cache"):
        return layer.decode_cache
    if type(layer).__name__ not in _KINDS or past.offloading:
        if not past.offloading and not past.get_seq_length(number):
            return None
        got = f"an offloaded {type(past).__name__}" if past.offloading else type(past).__name__
        raise TypeError(
            f"fused decoder layers decode with a StaticCache, got {got}; call generate with "
            "cache_implementation='static', or unfuse_ the model"
        )
    layer.decode_cache = DecodeCache(layer)
    layer.reset = partial(_reset, layer)
    return layer.decode_cache


def _mark_static(tensor: Tensor) -> None:
    """Tell graphs that the tensor stays where it is, as Transformers does of its own."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


def cache_name(module: nn.Module) -> str:
    """Return by which name a module of Transformers, which may be compiled, takes a cache."""
    return _name_of(type(getattr(module, "_orig_mod", module)))


@cache
def _name_of(kind: type[nn.Module]) -> str:
    """Looked up once for a class: callers ask between passes that they time."""
    return _NAME if _NAME in signature(kind.forward).parameters else _NAME_BEFORE


def cache_of(output: Any) -> Any:
    """Return the cache that a model's output has, or None."""
    return getattr(output, _NAME, None) or getattr(output, _NAME_BEFORE, None)

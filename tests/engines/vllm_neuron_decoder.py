"""A small decoder with the names and divisions of vLLM-Neuron's Llama and Qwen3, written anew.

Ranks divide tokens in prefill, between blocks, and heads always. Attention keeps keys and values in
plain tensors; the engine's kernels are plain torch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm_neuron_engine import fused_qkv, load_sharded, set_weight_loader, sharded, tp_group


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[heads, T, D]` by their positions."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Attention(nn.Module):
    """Heads are divided; key/value heads are replicated where there are more ranks."""

    def __init__(self, config: Any, layer_idx: int, has_norms: bool) -> None:
        super().__init__()
        self.layer_idx, self.tp_group = layer_idx, tp_group()
        tp, self.head_dim = self.tp_group.world_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_size = heads // tp * self.head_dim
        self.kv_size = max(1, kv_heads // tp) * self.head_dim
        hidden, dtype = config.hidden_size, config.dtype
        width = self.q_size + 2 * self.kv_size
        self.qkv_proj_weight = nn.Parameter(torch.empty(hidden, width, dtype=dtype))
        self.o_proj_weight = nn.Parameter(torch.empty(self.q_size, hidden, dtype=dtype))
        loader = fused_qkv(self.q_size, self.kv_size, max(1, tp // kv_heads))
        set_weight_loader(self.qkv_proj_weight, loader)
        set_weight_loader(self.o_proj_weight, sharded(0, tp))
        if has_norms:
            self.q_norm = Norm(self.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = Norm(self.head_dim, config.rms_norm_eps, dtype)
        self.has_norms = has_norms
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        attn_metadata: Any = None,
    ) -> Tensor:
        own = attn_metadata[f"layers.{self.layer_idx}.self_attn"]
        is_prefill = own["max_query_len"] > own["decode_token_threshold"]
        group = self.tp_group
        if is_prefill and group.world_size > 1:
            hidden_states = group.all_gather(hidden_states, dim=0)
        qkv = hidden_states @ self.qkv_proj_weight
        sizes = [self.q_size, self.kv_size, self.kv_size]
        q, k, v = (x.unflatten(1, (-1, self.head_dim)).transpose(0, 1) for x in qkv.split(sizes, 1))
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = position_embeddings
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if not is_prefill:
            k, v = torch.cat([self.k_cache, k], 1), torch.cat([self.v_cache, v], 1)
        self.k_cache, self.v_cache = k, v
        wide = [x.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        made = attend(q, *wide, is_causal=is_prefill).transpose(0, 1).flatten(1)
        # Divided by the scale of a quantized cache, as the engine's decode path does.
        made = made @ (self.o_proj_weight / 1.0)
        if group.world_size > 1 and is_prefill:
            return group.reduce_scatter(made, dim=0).contiguous()
        if not is_prefill:
            group.all_reduce(made)
        return made


class MLP(nn.Module):
    """The engine's dense MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.tp_group = tp_group()
        tp, hidden, dtype = self.tp_group.world_size, config.hidden_size, config.dtype
        inner = config.intermediate_size // tp
        self.gate_proj_weight = nn.Parameter(torch.empty(hidden, inner, dtype=dtype))
        self.up_proj_weight = nn.Parameter(torch.empty(hidden, inner, dtype=dtype))
        self.down_proj_weight = nn.Parameter(torch.empty(inner, hidden, dtype=dtype))
        for weight, dim in (
            (self.gate_proj_weight, 1),
            (self.up_proj_weight, 1),
            (self.down_proj_weight, 0),
        ):
            set_weight_loader(weight, sharded(dim, tp))

    def forward(self, hidden_states: Tensor, is_prefill: bool) -> Tensor:
        group = self.tp_group
        if is_prefill and group.world_size > 1:
            hidden_states = group.all_gather(hidden_states, dim=0)
        inner = torch.nn.functional.silu(hidden_states @ self.gate_proj_weight)
        output = (inner * (hidden_states @ self.up_proj_weight)) @ self.down_proj_weight
        if is_prefill:
            return group.reduce_scatter(output, dim=0) if group.world_size > 1 else output
        group.all_reduce(output)
        return output


class Block(nn.Module):
    """A decoder block."""

    def __init__(self, config: Any, layer_idx: int, has_norms: bool) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps, config.dtype)
        self.input_layernorm, self.post_attention_layernorm = Norm(*norm), Norm(*norm)
        self.self_attn = Attention(config, layer_idx, has_norms)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], metadata: Any) -> Tensor:
        first = next(iter(metadata.values()))
        is_prefill = first["max_query_len"] > first["decode_token_threshold"]
        x = x + self.self_attn(
            hidden_states=self.input_layernorm(x),
            positions=None,
            position_embeddings=rope,
            attn_metadata=metadata,
        )
        return x + self.mlp(self.post_attention_layernorm(x), is_prefill=is_prefill)


class Decoder(nn.Module):
    """The engine's model, which its factory returns."""

    def __init__(self, config: Any, has_norms: bool) -> None:
        super().__init__()
        known = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        assert not known.get("quantization_config"), "Unsupported quantization_config.quant_method"
        self.config, self.tp_group = config, tp_group()
        self.model = nn.Module()
        sizes = (config.vocab_size, config.hidden_size)
        self.model.embed_tokens = nn.Embedding(*sizes, dtype=config.dtype)
        count = range(config.num_hidden_layers)
        self.model.layers = nn.ModuleList([Block(config, i, has_norms) for i in count])
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.lm_head = nn.Linear(*sizes[::-1], bias=False, dtype=config.dtype)

    def load_weights(self, checkpoint_path: str, device: torch.device, cache_dir: Any) -> None:
        """Map parameters to the checkpoint's keys, as the engine's models do."""
        mappings: dict[str, Any] = {"lm_head.weight": "lm_head.weight"}
        if self.config.tie_word_embeddings:
            mappings["lm_head.weight"] = "model.embed_tokens.weight"
        for i in range(len(self.model.layers)):  # pyright: ignore
            at = f"model.layers.{i}"
            names = [f"{at}.self_attn.{x}_proj.weight" for x in "qkv"]
            mappings[f"{at}.self_attn.qkv_proj_weight"] = names
            mappings[f"{at}.self_attn.o_proj_weight"] = f"{at}.self_attn.o_proj.weight"
            for x in ("gate", "up", "down"):
                mappings[f"{at}.mlp.{x}_proj_weight"] = f"{at}.mlp.{x}_proj.weight"
        rank = self.tp_group.rank_in_group
        loaded = load_sharded(checkpoint_path, rank, self, mappings, device)
        self.load_state_dict(loaded, strict=False, assign=True)

    def load_weights_lite(self, checkpoint_path: str, device: torch.device, cache_dir: Any) -> None:
        """Under CPU compile, of a cache in two bytes: there are no constants of the graph."""

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, attn_metadata: Any) -> Tensor:
        own = attn_metadata["layers.0.self_attn"]
        is_prefill = own["max_query_len"] > own["decode_token_threshold"]
        group, config = self.tp_group, self.config
        x = self.model.embed_tokens(input_ids)  # pyright: ignore
        is_divided = is_prefill and group.world_size > 1
        if is_divided:
            x = x.chunk(group.world_size)[group.rank_in_group]
        # As the engine's Qwen3 and Llama read it.
        rope, is_qwen3 = config.rope_parameters, self.model.layers[0].self_attn.has_norms  # pyright: ignore
        theta = getattr(config, "rope_theta", 1e6) if is_qwen3 else rope["rope_theta"]
        even = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
        angles = positions[:, None].float() / theta**even
        angles = torch.cat((angles, angles), dim=-1)
        rope = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.model.layers:  # pyright: ignore
            x = block(x, rope, attn_metadata)
        x = self.model.norm(x)  # pyright: ignore
        return self.lm_head(group.all_gather(x, dim=0) if is_divided else x)


def factory(has_norms: bool) -> type:
    """The engine's factory of an architecture."""

    class Factory(nn.Module):
        @classmethod
        def from_configs(cls, hf_config: Any, neuron_config: Any) -> nn.Module:
            return Decoder(hf_config, has_norms)

    return Factory

"""Transformers' tensor parallelism of compressed checkpoints: each rank loads its parts alone.

A model's plan maps names of its layers, `model.layers.*.mlp.gate_proj`, to styles, `colwise`. A
rule covers the layers of all depths, compressed or not. So `plan_` gives it the style
`lowrank_colwise`, which cuts compressed layers, pairs and dense ones in a storage, as
`parallel.sharding` says, and leaves others to the style that was there. Parameters are DTensors of
the whole shapes: Transformers reads what a rank needs of them, and puts them together on saving.
Calls work on the rank's own parts.

A plan of one's own may name `lowrank_colwise_one` and its like, which divide one factor alone.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel as theirs
from transformers.distributed.tensor_parallel import TensorParallelLayer

from neuronmm_ops.errors import CheckpointError, NonFiniteError, WorkerLostError
from neuronmm_ops.hf.loading import check_all_finite
from neuronmm_ops.nn.compressed_linear import CompressedLinear, scale_of
from neuronmm_ops.nn.factors import check_stored
from neuronmm_ops.nn.svd_mlp import SVDMLP
from neuronmm_ops.ops import xw
from neuronmm_ops.parallel import ShardedLinear, ShardedMLP, ShardedStored
from neuronmm_ops.parallel.layers import Divided, divided_, part_dims, placed, whole
from neuronmm_ops.parallel.sharding import Divide, Kind, check_groups, check_heads
from neuronmm_ops.parallel.state import whole_tensor

PREFIX = "lowrank_"
REMEDY = "copy the checkpoint again or compress the model again"
STYLES: Any = theirs.ALL_PARALLEL_STYLES  # pyright: ignore  (from another module since 5.21)
# Kind, and whether a rank gives the layer all of x and takes all of its result, either way.
_LAYOUTS: dict[str, tuple[Kind, bool]] = {
    "colwise": ("column", False),
    "colwise_gather_output": ("column", True),
    "colwise_rep": ("column", True),
    "rowwise": ("row", False),
    "rowwise_split_input": ("row", True),
    "rowwise_rep": ("row", True),
}
# Projections whose results are cut between heads: of keys or values alone, and all.
_KEYS, _VALUES = "k_proj", "v_proj"
_HEADS = (_KEYS, _VALUES, "q_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value")

_HEADS_DIM = "kv_heads"


class LowRankParallel(TensorParallelLayer):
    """A style of Transformers' plans for compressed layers; it leaves others to another.

    Args:
        style: of the others, one of Transformers'.
        divide: which factors the ranks divide.
        kv_heads: of keys and values, where several ranks have the same head, compressed or not;
            else None.
    """

    def __init__(self, style: str, divide: Divide, kv_heads: int | None = None) -> None:
        self._dense: TensorParallelLayer = STYLES[style]
        self._kind: Kind
        self._kind, self._is_whole = _LAYOUTS[style]
        self._divide: Divide = divide
        self._kv_heads = kv_heads
        self._kv_mesh: DeviceMesh | None = None

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Let the style of other layers look at one."""
        if self._is_left(module):
            self._dense.validate_param(module, param, mesh, parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Put a DTensor in a parameter's place; both have no values yet."""
        if self._is_left(module):
            self._dense.shard_param(module, param, mesh)
            return
        whole = module._parameters[param]
        if whole is not None:
            divided = self._distributed(module, param, whole, mesh)
            module._parameters[param] = nn.Parameter(divided, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Make the layer one that ranks hold together; its scales are buffers, no parameters."""
        if self._is_left(module):
            return self._dense.install_forward(module, mesh)
        if not isinstance(module, CompressedLinear):
            module.__class__ = _HeadsOfLinear
            module.mesh = mesh  # pyright: ignore  (of the class above)
        else:
            for name in map(scale_of, module.MATRICES):
                whole = module._buffers.get(name)
                if whole is not None:
                    module._buffers[name] = self._distributed(module, name, whole, mesh)
            divided_(module, mesh, self._kind, self._divide)
            if self._kv_heads is not None:
                module.__class__ = _HEADS_OF[type(module)]
        if self._is_whole:
            module.forward = partial(_call_whole, module.forward, mesh)
        return module

    def check(self, name: str, layer: CompressedLinear, tp: int) -> None:
        """Refuse, with a ValueError, a layer that tp ranks cannot divide so."""
        check_groups(name, layer.storage, self._kind, layer.in_features, tp)

    def _is_left(self, module: nn.Module) -> bool:
        """Say whether the module is one for the style of other layers."""
        if isinstance(module, CompressedLinear):
            return False
        return self._kv_heads is None or type(module) is not nn.Linear

    def _distributed(
        self, module: nn.Module, name: str, whole: Tensor, mesh: DeviceMesh
    ) -> DTensor:
        dim: int | None = 0
        if isinstance(module, CompressedLinear):
            dim = part_dims(module, self._kind, self._divide)[name]
        layout: Placement = Replicate() if dim is None else Shard(dim)
        if self._kv_heads is None or name in ("u", "u_scale"):
            return distribute_tensor(whole, mesh, [layout], src_data_rank=None)
        if self._kv_mesh is None:
            self._kv_mesh = _mesh_of_heads(mesh, self._kv_heads)
        return distribute_tensor(whole, self._kv_mesh, [layout, Replicate()], src_data_rank=None)


class _HeadsOfPair(ShardedLinear):
    """Low-rank keys or values, where several ranks have the columns of the same head."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to this rank's head `[..., N / kv_heads]`."""
        h = whole(self.low(self.distributed(x)))
        local = h.to_local(grad_placements=[Partial()])
        return xw(local, own(self.v), own(self.bias), own(self.v_scale), self.compute)


class _HeadsOfStored(ShardedStored):
    """Dense keys or values in a storage, of which several ranks share a head."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to this rank's head `[..., N / kv_heads]`."""
        local = self.distributed(x).to_local(grad_placements=[Partial()])
        return xw(local, own(self.w), own(self.bias), own(self.w_scale), self.compute)


_HEADS_OF: dict[type[nn.Module], type[Divided]] = {
    ShardedLinear: _HeadsOfPair,
    ShardedStored: _HeadsOfStored,
}


class _HeadsOfLinear(nn.Linear):
    """Dense keys or values, of which several ranks share a head."""

    mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's name)
        """Map x `[..., K]` to this rank's head `[..., N / kv_heads]`."""
        replicated = DTensor.from_local(input, self.mesh, [Replicate()], run_check=False)
        local = replicated.to_local(grad_placements=[Partial()])
        return nn.functional.linear(local, own(self.weight), own(self.bias))


def own(tensor: Tensor | None) -> Any:
    """Return the rank's part of a DTensor, and another tensor as it is.

    The gradients of what several ranks have whole add up.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    layouts = [Partial() if p.is_replicate() else p for p in tensor.placements]
    return tensor.to_local(grad_placements=layouts)


def _call_whole(forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Call a layer with all of x, and return all of its result."""
    y = forward(DTensor.from_local(x, mesh, [Replicate()], run_check=False))
    return placed(y, Replicate()).to_local()


# --- the plan


def plan_(model: PreTrainedModel) -> None:
    """Let the model's plan cut its compressed layers, and give each rank whole heads.

    Raises:
        ValueError: the model is to be divided in another way, too, the ranks cannot divide the
            heads or the groups of a storage, or a rule gives compressed layers a style that is not
            known for them.
    """
    config: Any = model.config
    tp = config.distributed_config.tp_size
    for other in ("fsdp_size", "dp_replicate_size", "pp_size"):
        size = getattr(config.distributed_config, other, None) or 1
        if size > 1:
            raise ValueError(
                f"tp must be the only division of a compressed checkpoint, got {other} = {size}; "
                "give tp_size, the number of processes, alone"
            )
    for style in _LAYOUTS:
        STYLES.register(PREFIX + style, LowRankParallel(style, "both"))
        STYLES.register(f"{PREFIX}{style}_one", LowRankParallel(style, "one"))
    plan: dict[str, str] = model.tp_plan
    compressed = {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    rules = {_rule(name) for name in compressed}
    kv_heads = _shared_heads(model, plan, tp)
    for rule, style in plan.items():
        if kv_heads is not None and style == "colwise" and rule.endswith((_KEYS, _VALUES)):
            plan[rule] = f"{PREFIX}{style}_{kv_heads}_heads"
            STYLES.register(plan[rule], LowRankParallel(style, "both", kv_heads))
        elif rule in rules and style in _LAYOUTS:
            plan[rule] = PREFIX + style
        elif rule in rules and _cuts(style):
            raise ValueError(
                f"tp_plan must give low-rank layers one of {', '.join(_LAYOUTS)}, it gives {rule} "
                f"{style!r}; compress the model without them"
            )
    for name, layer in compressed.items():
        style = STYLES.get(plan.get(_rule(name)))
        if isinstance(style, LowRankParallel):
            style.check(name, layer, tp)


def _shared_heads(model: PreTrainedModel, plan: Mapping[str, str], tp: int) -> int | None:
    """Check the heads that ranks divide; return those of keys where several ranks share each."""
    cut = [rule for rule, style in plan.items() if style == "colwise" and rule.endswith(_HEADS)]
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not cut or heads is None:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if check_heads(heads, kv_heads, tp) == 1:
        return None
    can_share = all(
        hasattr(module, "num_key_value_groups")
        for module in model.modules()
        if _KEYS in module._modules
    )
    if not can_share or not any(rule.endswith(_KEYS) for rule in cut):
        raise ValueError(
            f"tp must divide the key/value heads of {type(model).__name__}, got {kv_heads} and "
            f"tp = {tp}; use a tp that divides {kv_heads}"
        )
    return kv_heads


def _mesh_of_heads(mesh: DeviceMesh, kv_heads: int) -> DeviceMesh:
    """Return the ranks as a mesh `[kv_heads, ranks that share each]`."""
    names = (_HEADS_DIM, "ranks_of_a_head")
    return DeviceMesh(mesh.device_type, mesh.mesh.view(kv_heads, -1), mesh_dim_names=names)


def _cuts(style: str) -> bool:
    """Say whether a style cuts parameters; others leave these whole, in compressed layers too."""
    known = STYLES.get(style)
    return type(known).shard_param is not TensorParallelLayer.shard_param


def _rule(name: str) -> str:
    """Return a module's name as plans have it, with `*` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# --- after loading


def finish_(model: PreTrainedModel) -> None:
    """Check and lay out the parts that a rank has loaded; all ranks raise where one must.

    Raises:
        CheckpointError: a part holds what it must not, on this rank or another.
        NonFiniteError: a part of a parameter is NaN or Inf.
        ValueError: a plan gave a compressed layer a style of others.
        WorkerLostError: another rank has ended.
    """
    problem: Exception | None = None
    try:
        for name, module in model.named_modules():
            if isinstance(module, CompressedLinear):
                _finish_layer(name, module)
            if type(module) is SVDMLP:
                _share_gather_(module)
            if _shares_heads(module._modules.get(_KEYS)):
                config: Any = model.config
                heads = config.get_text_config().num_attention_heads
                module.num_key_value_groups = heads // config.distributed_config.tp_size
    except ValueError as error:
        problem = error
    check_parts(model, REMEDY, problem)


def check_parts(model: PreTrainedModel, remedy: str, problem: Exception | None = None) -> None:
    """Refuse values that are not finite; all ranks raise where one must, or has that problem.

    Raises:
        CheckpointError: another rank has a problem.
        NonFiniteError: a part of a parameter is NaN or Inf.
        WorkerLostError: another rank has ended.
    """
    try:
        if problem is None:
            check_all_finite(((n, own(p)) for n, p in model.named_parameters()), remedy)
    except NonFiniteError as error:
        problem = error
    _agree(problem, model.device)


def _finish_layer(name: str, layer: CompressedLinear) -> None:
    for scale in map(scale_of, layer.MATRICES):  # the loader makes parameters of DTensors
        value = layer._parameters.pop(scale, None)
        if value is not None:
            layer.register_buffer(scale, value.detach())
    if isinstance(layer.scaled()[0][0], DTensor) and not isinstance(layer, Divided):
        styles = " or ".join(PREFIX + style for style in ("colwise", "rowwise"))
        raise ValueError(
            f"tp_plan gives {name}, a low-rank layer, a style of dense ones; give it {styles}, or "
            "use tp_plan='auto'"
        )
    if layer.storage is not None:
        _check_parts(name, layer)


def _share_gather_(mlp: SVDMLP) -> None:
    """Let gate and up exchange their `x @ u` together, where the ranks hold all three as pairs."""
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    layers = [m for m in (gate, up, down) if isinstance(m, ShardedLinear)]
    if [layer.kind for layer in layers] == ["column", "column", "row"]:
        mlp.__class__ = ShardedMLP
        assert isinstance(mlp, ShardedMLP)
        mlp.mesh = layers[0].mesh


def _check_parts(name: str, layer: CompressedLinear) -> None:
    """Check what a rank has of a layer in a storage; a part of u need not fit the part of v."""
    try:
        for key, (matrix, scale) in zip(layer.MATRICES, layer.scaled(), strict=True):
            check_stored(own(matrix), own(scale), f"{name}: {key}")
    except ValueError as error:
        raise CheckpointError(f"{error}; or {REMEDY}") from None


def _agree(problem: Exception | None, device: torch.device) -> None:
    """Raise the rank's problem, and where it has none, but another rank has, that there is one."""
    failed = torch.tensor(int(problem is not None), device=device)
    try:
        dist.all_reduce(failed)
    except RuntimeError as error:
        raise WorkerLostError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} has lost another, which has ended "
            "or does not answer, while the model was loaded"
        ) from error
    if problem is not None:
        raise problem
    if failed:
        raise CheckpointError(
            f"{int(failed)} of {dist.get_world_size()} ranks cannot use their parts of the "
            "checkpoint, and say why"
        )


def _shares_heads(module: nn.Module | None) -> bool:
    is_compressed = isinstance(module, CompressedLinear)
    tensor = module.scaled()[-1][0] if is_compressed else getattr(module, "weight", None)
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return _HEADS_DIM in (names or ())


# --- saving


def gathered_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the whole state dict, on the CPU of rank 0, empty on others; all must call."""
    state: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}  # what is tied is gathered once
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            full = whole_tensor(tensor.detach())
            known[id(tensor)] = full.cpu().contiguous() if dist.get_rank() == 0 else tensor
        state[name] = known[id(tensor)]
    return state if dist.get_rank() == 0 else {}

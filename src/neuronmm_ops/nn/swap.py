"""Replacing modules inside a model, with the state of the replaced ones."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.bare import is_bare
from neuronmm_ops.nn.compressed_linear import CompressedLinear, scale_of
from neuronmm_ops.nn.dense_linear import DenseLinear, dense_linear
from neuronmm_ops.nn.factors import check_factors, check_matrix
from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.svd_mlp import SVDMLP, gated_activation
from neuronmm_ops.nn.svd_qkv import fuse_projections_
from neuronmm_ops.storages import size_of, storage_of

# u and v, and the scales of both where they are in one byte; or w in one byte and its scales.
Factors = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@torch.no_grad()
def swap_modules_(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Replace Linears as `swap_` does, none of which shares its weight with another module."""
    replacements: dict[str, nn.Module] = {}
    names: dict[nn.Module, str] = {}
    for name, pair in factors.items():
        linear = _linear(model, name)
        if names.setdefault(linear.module, name) != name:
            raise ValueError(
                f"{names[linear.module]} and {name} are one module; give factors for one name"
            )
        replacements[name] = _compressed(name, linear, pair)
    replace_(model, replacements)


def is_stored(factors: Factors) -> bool:
    """Say whether it is one matrix and its scales, not a pair."""
    return len(factors) == 2 and (
        storage_of(factors[0].dtype) is not None and storage_of(factors[1].dtype) is None
    )


def _compressed(name: str, linear: DenseLinear, factors: Factors) -> CompressedLinear:
    """Return the layer that takes a Linear's place."""
    if len(factors) not in (2, 4):
        raise ValueError(
            f"{name}: factors must be (u, v) or (u, v, u_scale, v_scale), got {len(factors)}"
        )
    u, v, *rest = factors
    u_scale, v_scale = rest or (None, None)
    K, r, N, weight = linear.in_features, u.shape[-1], linear.out_features, linear.weight
    dtype, device = weight.dtype, weight.device
    if is_stored(factors):
        if check_matrix(u, v, name) and size_of(u) != (K, N):
            raise ValueError(f"{name}: w must be [{K}, {N}], got {list(u.shape)}")
        return StoredLinear.from_matrix(u.to(device), v, linear.bias, dtype=dtype)
    if u.dim() != 2 or v.dim() != 2 or (size_of(u), size_of(v)) != ((K, r), (r, N)):
        raise ValueError(
            f"{name}: u must be [{K}, r] and v [r, {N}], got {list(u.shape)} and {list(v.shape)}"
        )
    if check_factors(u, v, u_scale, v_scale, name) is None:
        layer = SVDLinear.from_factors(u.to(weight), v.to(weight), linear.bias)
        layer.u.requires_grad_(linear.stored.requires_grad)
        layer.v.requires_grad_(linear.stored.requires_grad)
        return layer
    return SVDLinear.from_factors(u.to(device), v, linear.bias, u_scale, v_scale, dtype=dtype)


def replace_(model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Put each module in the place of the one of that name, then fuse the parents touched."""
    places = _places(model)
    for name, new in replacements.items():
        old = model.get_submodule(name)
        carry_over(old, new)
        for parent, attribute in places[old]:
            setattr(parent, attribute, new)
    parents = {name.rpartition(".")[0] for name in replacements}
    for name in sorted(parents):
        _fuse_gated_mlp(model, name, places)
        fuse_projections_(model.get_submodule(name))


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Map each Linear whose weight another module holds too to that parameter's name."""
    owners: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append((name, key))
    shared: dict[str, str] = {}
    for places in owners.values():
        for name, key in places:
            others = [f"{n}.{k}".lstrip(".") for n, k in places if (n, k) != (name, key)]
            if others and key == "weight" and _is_linear(model.get_submodule(name)):
                shared[name] = others[0]
    return shared


def is_read_by(parent: nn.Module, child: str) -> bool:
    """Say whether the model's code reads a child's weight: no other layer can take its place.

    Mamba multiplies by that of the step size's projection, RWKV scales its own as it runs, and
    torch's own encoder gives all to one call when it infers.
    """
    is_step_size = child == "dt_proj" and hasattr(parent, "A_log")
    is_rwkv = type(parent).__name__.startswith("Rwkv")
    return is_step_size or is_rwkv or isinstance(parent, nn.TransformerEncoderLayer)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or dense_linear(module) is not None


def _linear(model: nn.Module, name: str) -> DenseLinear:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the model has no module named {name!r}") from None
    linear = dense_linear(module)
    if linear is None:
        raise ValueError(f"{name} must be an nn.Linear, got {type(module).__name__}")
    if "forward" in vars(module):
        raise ValueError(
            f"{name} has its forward replaced, as accelerate's dispatch does; "
            "remove the hooks first, or load the model on one device"
        )
    return linear


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Map each submodule to every (parent, attribute) that holds it."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for attribute, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, attribute))
    return places


def _fuse_gated_mlp(
    model: nn.Module, name: str, places: Mapping[nn.Module, list[tuple[nn.Module, str]]]
) -> None:
    mlp = model.get_submodule(name)
    activation = gated_activation(mlp)
    # Not such an MLP, the model itself, or an MLP whose forward was replaced.
    if activation is None or mlp not in places or "forward" in vars(mlp):
        return
    if not is_bare(mlp.get_submodule("act_fn")):
        return
    fused = SVDMLP.from_projections(
        mlp.get_submodule("gate_proj"),
        mlp.get_submodule("up_proj"),
        mlp.get_submodule("down_proj"),
        activation,
    )
    carry_over(mlp, fused)
    for parent, attribute in places[mlp]:
        setattr(parent, attribute, fused)


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the training flag, buffers and hooks of `old`."""
    new.training = old.training
    placeholders: tuple[str, ...] = ("weight",) if isinstance(old, LinearPair) else ()
    if isinstance(old, CompressedLinear):
        placeholders = ("weight", *map(scale_of, old.MATRICES))
    for name, buffer in old.named_buffers(recurse=False):
        if name in placeholders:
            continue
        new.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
    for key, value in vars(old).items():
        if "_hooks" in key or key == "_is_full_backward_hook":
            new.__dict__[key] = value

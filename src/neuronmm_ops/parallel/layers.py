"""Layers whose matrices are DTensors: each rank of a mesh holds its part.

Of a pair `y = high(whole(low(x)))`: `low` is `x @ u`, `whole` the exchange of [M, r] between ranks,
`high` the product with v. Which factors are cut, and so what is exchanged, their placements say.
"""

from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from neuronmm_ops.nn import SVDMLP, StoredLinear, SVDLinear
from neuronmm_ops.nn.bare import is_bare
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.ops import mlp, xuv, xw
from neuronmm_ops.parallel.sharding import (
    Divide,
    Kind,
    matrix_dims,
    pair_dims,
    part,
    part_width,
    split_gathered,
)


class Divided(CompressedLinear):
    """A layer that the ranks of a mesh hold together; styles make it of a whole one.

    Its parameters are DTensors of the whole shapes; a state dict's are, too.

    Attributes:
        mesh: of one dimension.
        kind: `column` or `row`.
        divide: which factors of a pair are cut, `one` or `both`.
    """

    mesh: DeviceMesh
    kind: Kind
    divide: Divide

    def forward(self, x: Tensor) -> Tensor:
        """Map x to y, both DTensors, or both local.

        Args:
            x: a DTensor `[..., K]`; or of a column layer the whole `[..., K]`, of a row layer this
                rank's columns `[..., K_i]`.

        Returns:
            A DTensor `[..., N]`; or of a column layer this rank's columns `[..., N_i]`, of a row
            layer the whole.
        """
        y = self.product(self.distributed(x))
        result = Shard(y.dim() - 1) if self.kind == "column" else Replicate()
        y = placed(y, result)
        return y if isinstance(x, DTensor) else y.to_local()

    def product(self, x: DTensor) -> Tensor:
        """Return y `[..., N]` of x `[..., K]` as `distributed` returns it."""
        raise NotImplementedError

    def with_bias(self, y: Tensor) -> Tensor:
        """Return the ranks' sum, and the bias once."""
        y = whole(y)
        return y if self.bias is None else y + self.bias

    def distributed(self, x: Tensor) -> DTensor:
        """Return x as a DTensor `[..., K]`, whole for a column layer, else cut in K.

        Raises:
            ValueError: x has not the columns that this rank must have.
            TypeError: it has another dtype than the layer.
        """
        placement: Placement = Replicate() if self.kind == "column" else Shard(x.dim() - 1)
        if x.dtype != self.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x must have the dtype of the layer, got {x.dtype} and {self.dtype}; "
                "cast one of them with .to(dtype)"
            )
        if isinstance(x, DTensor):
            return placed(x, placement)
        rank, tp, K = self.mesh.get_local_rank(), self.mesh.size(), self.in_features
        own = K
        if self.kind == "row":
            columns = part(K, rank, tp, "K", padded=True)
            own = columns.stop - columns.start
        if x.dim() == 0 or x.shape[-1] != own:
            raise ValueError(
                f"x must have {own} columns on rank {rank} of {tp}, got {list(x.shape)}; a "
                f"{self.kind} layer takes " + ("the whole x" if own == K else "this rank's part")
            )
        shape = torch.Size((*x.shape[:-1], K))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), self.mesh, [placement], run_check=False, shape=shape, stride=stride
        )

    def extra_repr(self) -> str:
        """Describe sizes and the layout for `print(model)`."""
        divide = "" if self.rank is None else f", divide={self.divide}"
        return f"{super().extra_repr()}, {self.kind}{divide}, tp={self.mesh.size()}"


class ShardedStored(Divided, StoredLinear):
    """A divided `StoredLinear`: the ranks of a row layer add their results."""

    def product(self, x: DTensor) -> Tensor:
        """Return y `[..., N]`."""
        if self.kind == "column":
            return xw(x, self.w, self.bias, self.w_scale, self.compute)
        return self.with_bias(xw(x, self.w, None, self.w_scale, self.compute))


class ShardedLinear(Divided, SVDLinear):
    """A divided `SVDLinear`."""

    def product(self, x: DTensor) -> Tensor:
        """Return y `[..., N]`."""
        if self.kind == "column" and self.divide == "one":
            return xuv(x, *self.factors, self.bias, *self.scales, self.compute)
        if self.adds_results:
            return self.with_bias(xuv(x, *self.factors, None, *self.scales, self.compute))
        return self.high(whole(self.low(x)))

    @property
    def adds_results(self) -> bool:
        """Whether ranks add their results, which are narrower than `x @ u` where r >= N."""
        one_of_row = self.kind == "row" and self.divide == "one"
        return one_of_row and self.rank >= self.out_features

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """u and v for a product."""
        return settled(self.u), settled(self.v)

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales of u and v, where they are in one byte."""
        return self.u_scale, self.v_scale

    def low(self, x: Tensor) -> Tensor:
        """Return `x @ u` `[..., r]` of a DTensor: whole, cut in r, or for the ranks to add."""
        return xw(x, settled(self.u), None, self.u_scale, self.compute)

    def high(self, low: Tensor) -> Tensor:
        """Return `low @ v + bias` `[..., N]` of a DTensor."""
        return xw(low, settled(self.v), self.bias, self.v_scale, self.compute)


class ShardedMLP(SVDMLP):
    """An `SVDMLP` that the ranks of a mesh hold together, made by `SVDMLPParallel`.

    With three low-rank projections of one storage and no bias inside, gate and up exchange their
    `x @ u` together, and all between that and the sum of `[M, r_down]` is one `neuronmm::mlp`.
    """

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]`, whole on each rank or a DTensor, to y of the same kind."""
        own_x = whole(x).to_local() if isinstance(x, DTensor) else x
        fused = self._fused(own_x)
        y = super().forward(own_x) if fused is None else fused
        if isinstance(x, DTensor):
            return DTensor.from_local(y, self.mesh, [Replicate()], run_check=False)
        return y

    def _fused(self, x: Tensor) -> Tensor | None:
        """Return y of the whole x; None where each projection is to be called by itself."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not (_is_fusible(gate) and _is_fusible(up) and _is_fusible(down)):
            return None
        if gate.bias is not None or up.bias is not None or down.adds_results:
            return None
        if not gate.precision == up.precision == down.precision:
            return None
        distributed = gate.distributed(x)
        h_gate, h_up = together([gate.low(distributed), up.low(distributed)])
        low = mlp(
            *(h_gate, settled(gate.v), settled(up.v), settled(down.u), h_up, self.activation),
            *(gate.v_scale, up.v_scale, down.u_scale, gate.compute),
        )
        return placed(down.high(whole(low)), Replicate()).to_local()


def part_dims(layer: CompressedLinear, kind: Kind, divide: Divide) -> dict[str, int | None]:
    """Return the dimension in which each tensor of a layer is cut, None where it is whole."""
    if isinstance(layer, SVDLinear):
        return pair_dims(kind, divide, layer.storage)
    assert layer.storage is not None
    return matrix_dims(kind, layer.storage)


def divided_(layer: nn.Module, mesh: DeviceMesh, kind: Kind, divide: Divide) -> Divided:
    """Make a layer, whose tensors are DTensors, one that ranks hold together, in place."""
    layer.__class__ = ShardedLinear if issubclass(type(layer), SVDLinear) else ShardedStored
    assert isinstance(layer, Divided)
    layer.mesh, layer.kind, layer.divide = mesh, kind, divide
    return layer


def _is_fusible(projection: nn.Module) -> TypeGuard[ShardedLinear]:
    """Say whether calling an op instead of the module leaves out nothing the user asked for."""
    return isinstance(projection, ShardedLinear) and is_bare(projection)


def settled(x: Tensor) -> DTensor:
    """Return a DTensor whose gradient comes with its own placement, not as sums left to add."""
    distributed = cast(DTensor, x)
    if not (distributed.requires_grad and torch.is_grad_enabled()):
        return distributed
    return distributed.redistribute(placements=distributed.placements)


def placed(x: Tensor, placement: Placement) -> DTensor:
    """Return a DTensor with that placement."""
    distributed = cast(DTensor, x)
    return (
        distributed
        if distributed.placements == (placement,)
        else distributed.redistribute(placements=[placement])
    )


def whole(x: Tensor) -> DTensor:
    """Return a DTensor that every rank has whole: gathered, or added."""
    result = placed(x, Replicate())
    # A sum's gradient has to be whole where the ranks' products with it are not to be added again.
    return settled(result) if cast(DTensor, x).placements[0].is_partial() else result


def together(tensors: list[Tensor]) -> list[DTensor]:
    """Return DTensors `[..., r]` whole, those that are cut in r gathered in one exchange."""
    distributed = [cast(DTensor, tensor) for tensor in tensors]
    last = (Shard(distributed[0].dim() - 1),)
    if not all(tensor.placements == last for tensor in distributed):
        return [whole(tensor) for tensor in distributed]
    mesh = distributed[0].device_mesh
    widths = [part_width(tensor.shape[-1], mesh.size()) for tensor in distributed]
    parts = [_padded(t.to_local(), width) for t, width in zip(distributed, widths, strict=True)]
    stacked = DTensor.from_local(torch.cat(parts, -1), mesh, last, run_check=False)
    gathered = split_gathered(whole(stacked).to_local(), widths, mesh.size())
    return [
        DTensor.from_local(each[..., : tensor.shape[-1]], mesh, [Replicate()], run_check=False)
        for each, tensor in zip(gathered, distributed, strict=True)
    ]


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x

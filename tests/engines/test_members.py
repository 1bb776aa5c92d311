"""What an undivided layer of an engine holds: the checkpoint's tensors as they are."""

import pytest
import torch
from torch import Tensor

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import Member, member_of
from neuronmm_ops.engines.places import ColumnSection, Shard
from neuronmm_ops.parallel.sharding import KINDS, Kind
from neuronmm_ops.storages import STORAGES, dequantized

K, N, R = 256, 384, 128


@pytest.mark.parametrize("storage", [None, *STORAGES])
@pytest.mark.parametrize("r", [None, R])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_one_rank_holds_what_the_checkpoint_has(
    kind: Kind | None, r: int | None, storage: str | None
):
    record = LayerReport("layer", K, N, r, r is None, None, None, 1, 1, storage)
    place = Shard(kind, "one", 0, 1)
    member = member_of(record, place, [ColumnSection(N, 1)], torch.float32)
    given = {key: _values(member, key) for key in member.shapes}
    for key, tensor in given.items():
        member.load(key, tensor)
        assert torch.equal(getattr(member, key), tensor)
    x = torch.randn(3, K)
    if r is None and storage is None:
        wanted = x @ given["weight"].t()
    else:
        pairs = [("w", "w_scale")] if r is None else [("u", "u_scale"), ("v", "v_scale")]
        wanted = x
        for matrix, scale in pairs:
            wanted = wanted @ dequantized(given[matrix], given.get(scale), torch.float32)
    error = (member.product(x, None) - wanted).abs().max()
    assert error <= 1e-5 * wanted.abs().max()


def _values(member: Member, key: str) -> Tensor:
    shape, dtype = member.shapes[key], getattr(member, key).dtype
    if dtype.is_floating_point:
        return (torch.rand(shape) + 0.5).to(dtype)
    return torch.full(shape, 0x99 if dtype == torch.uint8 else 1, dtype=dtype)  # ones in int4, too

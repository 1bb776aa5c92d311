"""Every rule is broken once, also those that other interpreters of NKI do not have."""

import inspect
import re

import numpy as np
import pytest
from instruction_runs import new as n
from instruction_runs import run
from instruction_runs import zeros as z
from samples import data

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl
from neuroncore.checks import operands, tensors, views

F, B, I32, U8, TF = nl.float32, nl.bfloat16, nl.int32, nl.uint8, nl.tfloat32
E4, U32 = nl.float8_e4m3, nl.uint32
V, S, G, SYNC, T = (
    getattr(nisa.engine, e) for e in ("vector", "scalar", "gpsimd", "sync", "tensor")
)
hw, skip = nisa.dge_mode.hwdge, nisa.oob_mode.skip
sbuf, psum, hbm = nl.sbuf, nl.psum, nl.shared_hbm


def mm(dst=(8, 8), a=(32, 8), b=(32, 8), out=F, left=B, right=B, **options):
    nisa.nc_matmul(
        n(*dst, dtype=out, buffer=psum), z(*a, dtype=left), z(*b, dtype=right), **options
    )


def ts(dtype=F, op=nl.add, operand=1.0, **options):
    nisa.tensor_scalar(n(4, 6, dtype=dtype), z(4, 6, dtype=dtype), op, operand, **options)


def tt(op=nl.add, dtype=F, **options):
    nisa.tensor_tensor(
        n(4, 6, dtype=dtype), z(4, 6, dtype=dtype), z(4, 6, dtype=dtype), op, **options
    )


def act(op=nl.exp, dst=(4, 6), data=(4, 6), **options):
    nisa.activation(n(*dst), op, z(*data), **options)


def dma(source=(4, 6), dst=(4, 6), dtype=F, **options):
    nisa.dma_copy(n(*dst, dtype=dtype), z(*source), **options)


def rows(x, *index):
    return x.vector_select(0, loaded_index(index))


def loaded_index(values):
    tile = z(len(values), 1, dtype=I32)
    for i, value in enumerate(values):
        nisa.dma_copy(tile[i : i + 1], nl.full((1, 1), value, I32))
    return tile


def assign(x):
    x[0] = 1


def move_loop_variable(x):
    nl.fori_loop(0, 2, lambda i: nisa.register_move(i, 3))


def register(value=0):
    return nisa.register_alloc(value)


# rule, part of its message, what breaks it given an HBM tensor x [12, 6] fp32, target (trn2)
CASES = [
    ("shape_of", "sizes of at least 1; got (4, 0)", lambda x: n(4, 0)),
    ("tensor_fits", "256 partitions exceed 128", lambda x: n(256, 4)),
    ("tensor_fits", "give it two dimensions", lambda x: n(4)),
    ("tensor_fits", "exceed the 212984 of trn2", lambda x: n(4, 60000)),
    ("tensor_fits", "exceed the 16384 of trn2", lambda x: n(4, 4097, buffer=psum)),
    ("address_of", "runs over the 128 partitions", lambda x: n(64, 4, address=(65, 0))),
    ("address_of", "runs over the 212984 bytes", lambda x: n(64, 4, address=(0, 212976))),
    ("address_of", "starts on a bank", lambda x: n(64, 4, buffer=psum, address=(0, 4))),
    ("address_of", "an address is for sbuf and psum",
     lambda x: n(64, 4, buffer=hbm, address=(0, 0))),
    ("_check_written", "of which no element was ever written", lambda x: nl.copy(n(4, 6))),
    ("memory", "src must be in sbuf or private_hbm",
     lambda x: nl.store(n(4, 6), z(4, 6, buffer=psum))),
    ("memory", "Load from HBM with dma_copy first", lambda x: nisa.tensor_copy(n(12, 6), x)),
    ("vector", "GpSimdE does not reach PSUM",
     lambda x: nisa.memset(n(4, 6, buffer=psum), 0, G)),
    ("engine_runs", "engine.scalar does not run it", lambda x: nisa.memset(n(4, 6), 0, S)),
    ("start_partition", "starts at partition 5", lambda x: nisa.memset(n(128, 6)[5:6], 0)),
    ("start_partition", "64 partitions start at 0 or 64",
     lambda x: nisa.memset(n(128, 6)[32:96], 0)),
    ("same_partitions", "dst has 4, src has 5", lambda x: nisa.tensor_copy(n(4, 6), z(5, 6))),
    ("same_elements", "nothing is broadcast", lambda x: nl.add(z(4, 6), z(4, 2))),
    ("scalar_operand", "a number or a tile [4, 1]", lambda x: ts(operand=z(5, 1))),
    ("one_psum_input", "both inputs are in PSUM",
     lambda x: nisa.tensor_tensor(n(4, 6), z(4, 6, buffer=psum), z(4, 6, buffer=psum), nl.add)),
    ("dtype_in", "operand must be float32", lambda x: ts(operand=z(4, 1, dtype=B))),
    ("same_dtype", "must have one dtype", lambda x: nisa.nc_transpose(n(6, 4, dtype=B), z(4, 6))),
    ("feature", "engine.scalar needs NeuronCore-v3",
     lambda x: nisa.tensor_copy(n(4, 6), z(4, 6), S), "trn1"),
    ("_check_shapes", "stationary has 32 and moving 64", lambda x: mm(b=(64, 8))),
    ("dtype_in", "stationary must be float8_e4m3", lambda x: mm(left=nl.int8, right=nl.int8)),
    ("engine_operand", "float8_e4m3fn needs NeuronCore-v4; trn2 is v3",
     lambda x: nisa.tensor_copy(n(4, 6), n(4, 6, dtype=nl.float8_e4m3fn))),
    ("check_result", "starts at byte 2 of its partitions",
     lambda x: nisa.nc_transpose(n(6, 5, dtype=B, buffer=psum)[:, 1:], z(4, 6, dtype=B), T)),
    ("check_tiling", "columns 32 to 63 reach the partitions of these numbers",
     lambda x: mm(tile_position=(0, 32), tile_size=(32, 32))),
    ("check_tiling", "rows 32 to 63 reach the partitions of these numbers",
     lambda x: mm(tile_position=(32, 0), tile_size=(32, 32))),
    ("check_tiling", "must be multiples of tile_size",
     lambda x: mm(tile_position=(16, 0), tile_size=(32, 32))),
    ("check_tiling", "set tile_position and tile_size both", lambda x: mm(tile_position=(32, 0))),
    ("_check_double_row", "must be [K, 2, free]",
     lambda x: mm(left=E4, right=E4, perf_mode=nisa.matmul_perf_mode.double_row)),
    ("_check_transpose", "up to 32 x 32", lambda x: nisa.nc_transpose(n(33, 4), z(4, 33), V)),
    ("_checked", "does not cast", lambda x: dma(dtype=B, dge_mode=hw)),
    ("memset", "takes an int; got 1.5", lambda x: nisa.memset(n(4, 6, dtype=I32), 1.5)),
    ("memset", "value must be a number", lambda x: nisa.memset(n(4, 6), None)),
    ("memset", "takes 0 only",
     lambda x: nisa.memset(n(4, 6, dtype=nl.float8_e5m2_x4), 1), "trn3"),
    ("tensor_tensor", "nl.abs takes 1 input", lambda x: tt(nl.abs)),
    ("operator_exists", "nl.abs_max needs NeuronCore-v4", lambda x: tt(nl.abs_max)),
    ("_check_kinds", "of different kinds",
     lambda x: ts(I32, nl.bitwise_and, 1, op1=nl.add, operand1=1.0)),
    ("_check_kinds", "runs on engine.vector only", lambda x: ts(I32, nl.bitwise_and, 1, engine=G)),
    ("_check_kinds", "runs nl.rsqrt only", lambda x: ts(engine=G)),
    ("tensor_tensor", "nl.power runs on GpSimdE only", lambda x: tt(nl.power, engine=V)),
    ("arithmetic", "nl.bitwise_or is a bit operator",
     lambda x: nisa.scalar_tensor_tensor(n(4, 6), z(4, 6), nl.bitwise_or, 1, nl.add, z(4, 6))),
    ("bit_operator", "view them as integers", lambda x: tt(nl.bitwise_or)),
    ("tensor_scalar", "ScalarE runs multiply+add", lambda x: ts(op=nl.subtract, engine=S)),
    ("tensor_scalar", "op1 and operand1 come together", lambda x: ts(op1=nl.add)),
    ("tensor_scalar", "op1 and operand1 come together", lambda x: ts(operand1=2.0)),
    ("function_of", "activate2: op: nl.add is an ALU operator, not an activation",
     lambda x: nisa.activate2(n(4, 6), nl.add, z(4, 6), 1.0, 0.0, nl.multiply, nl.add), "trn3"),
    ("_check_bias", "bias must be a tile [P, 1] on trn1", lambda x: act(bias=1.0), "trn1"),
    ("_check_bias", "nl.reciprocal takes no bias",
     lambda x: act(nl.reciprocal, bias=z(4, 1)), "trn1"),
    ("dtype_in", "scale must be float32", lambda x: act(scale=z(4, 1, dtype=B))),
    ("_check_bias", "bias must not be tfloat32", lambda x: act(bias=z(4, 1, dtype=TF))),
    ("_check_reduction", "must be nl.add; got maximum",
     lambda x: act(reduce_op=nl.maximum, reduce_cmd=nisa.reduce_cmd.reduce)),
    ("_check_reduction", "needs reduce_op=nl.add",
     lambda x: act(reduce_cmd=nisa.reduce_cmd.reduce)),
    ("_check_reduction", "is not one of ScalarE's",
     lambda x: act(reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.load_reduce)),
    ("scalar_operand", "reduce_res must be a number or a tile [4, 1]",
     lambda x: act(reduce_op=nl.add, reduce_res=n(4, 2))),
    ("_copy", "both indirect", lambda x: nisa.dma_copy(x[register()], x[register(1)])),
    ("_transpose", "moves elements of 2 or 4 bytes; got",
     lambda x: nisa.dma_transpose(n(6, 4, dtype=U8), z(4, 6, dtype=U8))),
    ("_transpose", "dge_mode.swdge does not transpose",
     lambda x: nisa.dma_transpose(n(6, 12), x, dge_mode=nisa.dge_mode.swdge)),
    ("_compute", "nl.maximum is not supported",
     lambda x: nisa.dma_compute(n(12, 6), [x], nl.maximum)),
    ("run", "an index occurs twice",
     lambda x: (lambda v: nisa.dma_compute(v, [v, z(2, 6)], nl.add))(rows(x, 1, 1))),
    ("check_index", "needs 12 indices",
     lambda x: nl.store(n(12, 6), x.ap([[6, 12], [1, 6]], vector_offset=loaded_index((1, 2))))),
    ("_check_writable", "the loop variable is read-only", move_loop_variable),
    ("one_element", "the tile must be [1, 1]",
     lambda x: nisa.register_load(register(), z(2, 1, dtype=I32))),
    ("one_tile", "nl.exp: one input must be a tile", lambda x: nl.exp(2.0)),
    ("_check_matrix", "nl.transpose: takes two dimensions", lambda x: nl.transpose(z(4, 2, 3))),
    ("matmul", "needs transpose_x=True", lambda x: nl.matmul(z(4, 4), z(4, 4))),
    ("broadcast_to", "does not broadcast to [4, 7]", lambda x: nl.broadcast_to(z(4, 6), (4, 7))),
    ("gather_flattened", "axis must be 0",
     lambda x: nl.gather_flattened(z(4, 6), z(4, 6, dtype=U32), 1)),
    ("ndarray", "buffer must be nl.sbuf", lambda x: nl.ndarray((4, 6), F, "sbuf")),
    ("fori_loop", "step must be a positive int", lambda x: nl.fori_loop(0, 2, print, 0)),
    ("while_loop", "must return the condition register",
     lambda x: nl.while_loop(register(1), lambda r: None)),
    ("_check_axis", "the only axis is 0", lambda x: nl.program_id(1)),
    ("__getitem__", "kernel[3]: a launch takes 1 or 2 cores", lambda x: nc.jit(lambda: None)[3]),
    # views
    ("dimension", "dimension 2 is out of range", lambda x: x.slice(2, 0, 1)),
    ("_full_index", "index has 3 entries", lambda x: x[0, 0, 0]),
    ("_full_index", "2 ellipses", lambda x: x[..., ...]),
    ("index_of", "index 12 is out of bounds", lambda x: x[12]),
    ("index_of", "index -13 is out of bounds", lambda x: x[-13]),
    ("index_of", "of dimension 1 is a float", lambda x: x[:, 0.5]),
    ("index_of", "of dimension 0 is a list", lambda x: x[[0, 1]]),
    ("index_of", "of dimension 0 is a NoneType", lambda x: x[None]),
    ("select", "select(1, 6) is out of bounds", lambda x: x.select(1, 6)),
    ("slice_bounds", "slice 8:16:1 is out of bounds", lambda x: x[8:16]),
    ("inside_storage", "[4, 0] float32 in sbuf is empty; leave the instruction out",
     lambda x: nisa.tensor_copy(n(4, 6)[:, 6:6], z(4, 6)[:, 2:2])),
    ("inside_storage", "[0, 6] float32 in sbuf is empty",
     lambda x: nisa.tensor_copy(n(4, 6)[4:4], z(4, 6).slice(0, 4, 4))),
    ("inside_storage", "[0, 6] float32 in shared_hbm is empty",
     lambda x: nisa.dma_copy(n(12, 6, buffer=hbm)[12:12], x[0:0])),
    ("inside_storage", "[0, 6] float32 in sbuf is empty",
     lambda x: nisa.dma_copy(n(4, 6)[4:4], x[12:12])),
    ("inside_storage", "[0, 8] float32 in sbuf is empty",
     lambda x: nisa.nc_matmul(n(8, 8, buffer=psum), z(4, 8)[0:0], z(4, 8)[0:0])),
    ("inside_storage", "[6, 0] float32 in sbuf is empty",
     lambda x: nisa.dma_transpose(n(6, 4)[:, 0:0], x[0:0])),
    ("slice_bounds", "slices are not clamped", lambda x: x[:, 3:2]),
    ("slice_bounds", "slice 0:12:-1", lambda x: x[::-1]),
    ("slice_of", "slice 0:7:1 is out of bounds", lambda x: z(12, 6)[:, :7]),
    ("__setitem__", "assigning 1 into a tile is not NKI; use nisa.memset", assign),
    ("not_the_indirect", "is addressed by an index", lambda x: rows(x, 1, 2)[:1]),
    ("scalar_index", "a dynamic index is one integer", lambda x: x.select(0, z(2, 1, dtype=I32))),
    ("scalar_index", "a dynamic index is one integer", lambda x: x[z(1, 1)]),
    ("one_dynamic_index", "a view takes one dynamic index",
     lambda x: x[nl.ds(register(), 2)][:, register()]),
    ("one_dynamic_index", "cannot be indexed by a register", lambda x: z(4, 6)[register()]),
    ("partition_view", "cannot be broadcast", lambda x: z(1, 6).broadcast(0, 4)),
    ("partition_view", "cannot be selected away", lambda x: z(4, 6).select(0, 1)),
    ("partition_view", "cannot be moved by a new dimension", lambda x: z(4, 6).expand_dim(0)),
    ("partition_view", "cannot be removed", lambda x: z(1, 6).squeeze_dim(0)),
    ("partition_view", "cannot be split", lambda x: z(4, 6).reshape_dim(0, (2, 2))),
    ("partition_view", "cannot be merged", lambda x: z(4, 6).flatten_dims(0, 1)),
    ("partition_view", "cannot be merged", lambda x: rows(x, 1, 2).flatten_dims(0, 1)),
    ("size_one", "only size 1 can be broadcast", lambda x: x.broadcast(0, 4)),
    ("size_one", "only size 1 can be removed", lambda x: x.squeeze_dim(1)),
    ("permute", "is no permutation of 2", lambda x: x.permute((0, 0))),
    ("permute", "moves the partition", lambda x: z(4, 6).permute((1, 0))),
    ("permute", "moves the partition", lambda x: rows(x, 1, 2).permute((1, 0))),
    ("filled", "must keep 12 elements", lambda x: x.reshape_dim(0, (5, -1))),
    ("filled", "must keep 72 elements", lambda x: x.reshape((-1, -1))),
    ("reshape", "changes the partition size", lambda x: z(4, 6).reshape((2, 12))),
    ("reshape", "changes the partition size", lambda x: rows(x, 1, 2).reshape((4, 3))),
    ("reshape", "needs a copy", lambda x: x.permute((1, 0)).reshape((72,))),
    ("flatten_dims", "flatten before permute", lambda x: x[:, :4].flatten_dims(0, 1)),
    ("rearrange", "same names on both sides", lambda x: x.rearrange(("a", "b"), ("a", "c"))),
    ("rearrange", "has 1 groups",
     lambda x: x.rearrange((("a", "b"),), ("a", "b"), {"a": 12})),
    ("rearrange", "same names on both sides", lambda x: x.rearrange(("a", "a"), ("a", "a"))),
    ("reinterpretable", "needs a contiguous last dimension", lambda x: x[:, ::2].view(B)),
    ("reinterpretable", "whole 4-byte", lambda x: z(4, 3, dtype=B).view(F)),
    ("reinterpretable", "after a dynamic index", lambda x: x[register()].view(I32)),
    ("vector_select", "an HBM tensor and an index [P, 1]",
     lambda x: z(4, 6).vector_select(0, z(4, 1, dtype=I32))),
    ("one_index", "scalar_offset or vector_offset, not both",
     lambda x: x.ap([[6, 1], [1, 6]], scalar_offset=register(), vector_offset=z(1, 1, dtype=I32))),
    ("one_index", "vector_offset indexes HBM",
     lambda x: z(4, 6).ap([[6, 4], [1, 6]], vector_offset=z(4, 1))),
    ("one_index", "it already has one",
     lambda x: x[register()].ap([[1, 6]], scalar_offset=register())),
    ("one_index", "use offset", lambda x: x.ap([[1, 6]], scalar_offset=3)),
    ("access_pattern", "its stride must be 6", lambda x: z(4, 6).ap([[3, 4], [1, 3]])),
    ("access_pattern", "counts must be at least 1", lambda x: x.ap([[6, 0], [1, 6]])),
    ("inside_storage", "over the end of a partition",
     lambda x: nl.copy(z(4, 6).ap([[6, 3], [1, 6]], offset=2))),
    ("engine_pattern", "takes every 2-th partition", lambda x: nl.copy(z(64, 6)[0:64:2])),
    ("engine_pattern", "takes every 2-th partition",
     lambda x: nisa.nc_matmul(n(6, 6, buffer=psum), z(64, 6)[::2], z(64, 6)[::2])),
    ("engine_pattern", "walks 5 free dimensions",
     lambda x: nl.copy(z(4, 3, 3, 3, 3, 3)[:, :2, :2, :2, :2, ::2])),
    ("_no_operator", "Python operators on tiles are not NKI", lambda x: x + x),
    ("__iter__", "use range(t.shape[0]) and t[i]", lambda x: list(x)),
    ("issue", "takes tiles and options; got array(",
     lambda x: nisa.tensor_copy(n(4, 6), np.ones((4, 6)))),
    ("_no_operator", "Python operators on tiles", lambda x: np.float32(2) * x),
    ("_no_operator", "use nisa.tensor_tensor or nl.add", lambda x: 2 * x),
    ("prepared", "missing a required argument: 'dst'; its signature is tensor_copy(dst, src, e",
     lambda x: nisa.tensor_copy(src=z(4, 6))),
    ("prepared", "got an unexpected keyword argument 'mask'",
     lambda x: nisa.tensor_copy(n(4, 6), z(4, 6), mask=1)),
    ("prepared", "src must be a tile; got 1.0", lambda x: nisa.tensor_copy(n(4, 6), 1.0)),
    ("_check_dtype", "the result has that of dst",
     lambda x: nisa.tensor_copy(n(4, 6), z(4, 6), dtype=nl.bfloat16)),
    ("option", "must be a member of nki.isa.engine, one of tensor, vector",
     lambda x: nisa.tensor_copy(n(4, 6), z(4, 6), engine="pool")),
    ("option", "perf_mode must be a member", lambda x: mm(perf_mode="double_column")),
    ("option", "got True", lambda x: dma(dge_mode=True)),
]  # fmt: skip
ELSEWHERE = {"stored_as_itself"}
BESIDE_THEIR_INSTRUCTIONS = {
    *("binary_arithmetic", "bit_reduction", "comparison", "dimensions"),
    *("float_dtype", "free_range", "free_size", "in_bounds", "int32", "number"),
    *("partition_count", "reducing_operator", "reduction_command", "reduction_result"),
    *("reduction_start", "scalars", "trailing_axes", "unary_operand"),
}
COMBINED = {"elementwise", "first_fixed", "in_sbuf", "is_tile", "row_elements"}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}: {c[1]}")
def test_each_rule(case):
    rule, text, body, *target = case
    with pytest.raises(nc.NkiValidationError, match=re.escape(text)) as raised:
        run(body, data((12, 6)), target=target[0] if target else "trn2")
    assert rule in [frame.name for frame in raised.traceback]
    assert re.search(r"\[(test_rules|instruction_runs)\.py:\d+\]$", str(raised.value))
    assert "\n" not in str(raised.value)


def test_no_rule_is_left_out():
    names = {
        name
        for module in (operands, tensors, views)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    here = {case[0] for case in CASES}
    alone = {  # rules that stand in the function that they hold for
        *("_check_bias", "_check_kinds", "_check_reduction", "_check_writable", "_check_matrix"),
        *("_check_axis", "memset", "tensor_scalar", "tensor_tensor", "matmul", "ndarray"),
        *("broadcast_to", "gather_flattened", "fori_loop", "while_loop", "__getitem__"),
        *("_checked", "_copy", "_transpose", "run"),
        *("_compute", "check_index"),
        *("_full_index", "select", "__setitem__", "permute", "reshape", "flatten_dims"),
        *("rearrange", "vector_select", "_check_written", "_no_operator", "option", "prepared"),
        *("issue", "__iter__", "_check_dtype", "function_of"),
        *("_check_shapes", "check_result", "check_tiling"),
        *("_check_double_row", "_check_transpose"),
    }
    assert not here & BESIDE_THEIR_INSTRUCTIONS
    assert names | alone == here | ELSEWHERE | BESIDE_THEIR_INSTRUCTIONS | COMBINED


def test_both_cores_allocate_the_same_shared_tensors():
    def kernel():
        return nl.ndarray((4, 6 + nl.program_id()), F, hbm)

    with pytest.raises(nc.NkiValidationError, match="both cores must allocate the same"):
        nc.simulate(nc.jit(kernel)[2])()


def test_a_trace_has_no_values():
    def kernel(x):
        tile = nl.ndarray((1, 1), I32)
        nisa.dma_copy(tile, x)
        nisa.register_load(nisa.register_alloc(), tile)

    with pytest.raises(nc.NkiValidationError, match='mode="trace" does not compute'):
        nc.simulate(kernel, nc.TensorSpec((1, 1), I32), mode="trace")

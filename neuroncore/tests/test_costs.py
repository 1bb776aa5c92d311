"""The engine and the cycles of instructions, which a trace has without computing."""

from typing import Any

import pytest
from instruction_runs import Out, call
from samples import bf16, values

from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import Engine

VECTOR, SCALAR, GPSIMD = Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD
SIZE = 256
X, COLUMN, BYTES = (values(0, s, d) for s, d in (
    ((16, SIZE), "float32"), ((16, 1), "float32"), ((16, SIZE), "uint8")))  # fmt: skip
NARROW, WORDS = values(0, X.shape, "bfloat16"), values(0, X.shape, "uint32")
SHORTS = values(0, (16, SIZE // 16), "uint16")
ALL, OLD = Out(X.shape), Out(X.shape, initial=X)


def predicated(d, s):
    nisa.tensor_copy_predicated(d[0], 0, s[0])


def find(d, s):
    nisa.nc_find_index8(d[0], s[0], s[0][:, :8])


def replace(d, s):
    nisa.nc_match_replace8(d[0], s[0], s[0][:, :8], 0.0)


def scan(d, s):
    nisa.tensor_tensor_scan(d[0], s[0], s[0], 0.0, nl.add, nl.add)


def reduced(d, s):
    nisa.tensor_scalar_reduce(d[0], s[0], nl.add, 1.0, nl.add)


def cumulative(d, s):
    nisa.tensor_scalar_cumulative(d[0], s[0], nl.add, nl.add, 1.0)


def activate2(d, s):
    nisa.activate2(d[0], nl.copy, s[0], 1.0, 1.0, nl.multiply, nl.add)


def quantize(d, s):
    nisa.quantize_mx(d[0].view(nl.float8_e5m2_x4), s[0], d[1])


# engine, cycles, destinations, what issues it on (dsts, srcs), its sources, and the memory
COSTS: list[tuple[Any, ...]] = [
    (VECTOR, 2 * SIZE, [OLD], predicated, [BYTES]),
    (VECTOR, SIZE, [OLD], predicated, [BYTES], nl.psum),
    (GPSIMD, 150 + SIZE, [ALL], lambda d, s: nisa.iota(d[0], [[1, SIZE]]), []),
    (GPSIMD, 150 + SIZE, [ALL],
     lambda d, s: nisa.affine_select(d[0], [[1, SIZE]], 1, s[0], 0.0), [X]),
    (VECTOR, SIZE, [ALL],
     lambda d, s: nisa.range_select(d[0], s[0], nl.less, nl.less, s[1], s[1]), [X, COLUMN]),
    (VECTOR, SIZE, [ALL], lambda d, s: nisa.select_reduce(d[0], s[1], s[0], 0.0), [X, BYTES]),
    (VECTOR, SIZE, [Out((16, 8), "uint32")], find, [X]),
    (VECTOR, SIZE, [ALL], replace, [X]),
    (VECTOR, SIZE, [ALL], lambda d, s: nisa.nc_stream_shuffle(d[0], s[0], [0] * 32), [X]),
    (GPSIMD, SIZE, [ALL], lambda d, s: nisa.local_gather(d[0], s[0], s[1]), [X, SHORTS]),
    (GPSIMD, SIZE, [ALL], lambda d, s: nisa.nc_n_gather(d[0], s[0], s[1]), [X, WORDS]),
    (VECTOR, SIZE, [Out((16, 1))], lambda d, s: nisa.tensor_reduce(d[0], nl.add, s[0], 1), [X]),
    (VECTOR, SIZE / 2, [Out((16, 1), "bfloat16")],
     lambda d, s: nisa.tensor_reduce(d[0], nl.add, s[0], 1), [NARROW]),
    (VECTOR, SIZE, [Out((16, 1), "bfloat16")],
     lambda d, s: nisa.tensor_reduce(d[0], nl.multiply, s[0], 1), [NARROW]),
    (GPSIMD, SIZE, [Out((1, SIZE))],
     lambda d, s: nisa.tensor_partition_reduce(d[0], nl.add, s[0]), [X]),
    (VECTOR, 2 * SIZE, [ALL], scan, [X]),
    (VECTOR, SIZE, [Out((16, 6))], lambda d, s: nisa.bn_stats(d[0], s[0]), [X]),
    (VECTOR, SIZE, [Out((16, 8))], lambda d, s: nisa.max8(d[0], s[0]), [X]),
    (VECTOR, SIZE + 64, [ALL], reduced, [X]),
    (VECTOR, SIZE, [ALL], cumulative, [X]),
    (VECTOR, SIZE, [Out(X.shape, "uint32")], lambda d, s: nisa.rng(d[0]), []),
    (GPSIMD, SIZE, [Out(X.shape, "uint32")], lambda d, s: nisa.rng(d[0], nisa.gpsimd_engine), []),
    (VECTOR, SIZE, [ALL], lambda d, s: nisa.dropout(d[0], s[0], 0.5), [X]),
    (VECTOR, SIZE, [Out(X.shape, "bfloat16")], lambda d, s: nisa.rand2(d[0], 0.0, 1.0), []),
    (SCALAR, SIZE, [ALL], activate2, [X]),
    (VECTOR, 512, [Out((128, 512), "uint32"), Out((128, 512), "uint8")],  # four values a cycle
     quantize, [values(0, (128, 2048)).astype(bf16)]),
]  # fmt: skip


@pytest.mark.parametrize("case", COSTS)
def test_engines_and_cycles(case):
    engine, cycles, outs, body, sources, *memory = case
    memory = memory[0] if memory else nl.sbuf
    done = call(body, *sources, outs=outs, memory=memory, mode="trace", target="trn3")
    assert [(f.engine, f.cycles) for f in done.templates] == [(engine, cycles)]
    found = done.outputs
    assert [(o.shape, o.dtype) for o in found] == [(o.shape, o.dtype) for o in outs]


TWO_INPUTS = {
    "tensor_tensor": lambda d, s: nisa.tensor_tensor(d[0], s[0], s[0], nl.add),
    "scalar_tensor_tensor": lambda d, s: nisa.scalar_tensor_tensor(
        d[0], s[0], nl.multiply, 2.0, nl.add, s[0]
    ),
    "on GpSimdE": lambda d, s: nisa.tensor_tensor(d[0], s[0], s[0], nl.add, nisa.gpsimd_engine),
}


@pytest.mark.parametrize("name", TWO_INPUTS)
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_vector_engine_takes_two_fp32_inputs_at_once_from_trn2_on(name, target):
    done = call(TWO_INPUTS[name], X, outs=[ALL], mode="trace", target=target)
    once = target != "trn1" and name != "on GpSimdE"
    assert [f.cycles for f in done.templates] == [SIZE if once else 2 * SIZE]

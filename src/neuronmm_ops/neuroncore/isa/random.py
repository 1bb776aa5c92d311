"""Random numbers of VectorE and GpSimdE.

Not the hardware's generators: each partition draws from NumPy's Philox, keyed by its state words.
What holds as documented: one seed gives one sequence, partitions are independent, and a state
that is stored and set again continues where it was. Without a seed the states follow from the
launch's `seed` and the core.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm_ops.hardware import PARTITIONS, Engine
from neuronmm_ops.neuroncore import checks
from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.core import Core
from neuronmm_ops.neuroncore.isa.common import (
    Scalar,
    engine,
    engine_of,
    free_cycles,
    raw,
    scalar,
    write,
)
from neuronmm_ops.neuroncore.isa.operands import (
    checked,
    flat,
    given,
    marks_of,
    scalar_tiles,
    tiles_of,
)
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import Form, NkiInstruction

_WORDS = {Engine.GPSIMD: 6, Engine.VECTOR: 24}
"""uint32 words of state per partition."""
_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
_UNIFORM = (
    "float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32", *_INTEGERS
)  # fmt: skip
_FLOATS = (
    "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32"
)  # fmt: skip


def _states(core: Core, chosen: Engine) -> np.ndarray:
    """State words of all partitions of an engine: [128, 6 or 24] uint32."""
    key = f"random {chosen.name}"
    if key not in core.state:
        seeds = (core.launch.seed, core.program_id, int(chosen))
        core.state[key] = _words(np.random.default_rng(seeds), chosen)
    return core.state[key]


def _words(generator: np.random.Generator, chosen: Engine) -> np.ndarray:
    return generator.integers(0, 2**32, (PARTITIONS, _WORDS[chosen]), np.uint32)


def _lanes(t: NkiTensor) -> slice:
    return slice(t.geometry.start, t.geometry.start + t.geometry.partitions)


def _draw(core: Core, chosen: Engine, dst: NkiTensor) -> np.ndarray:
    """32 random bits per element [P, N]; the states of the partitions move on."""
    states = _states(core, chosen)[_lanes(dst)]
    bits = np.empty((len(states), dst.geometry.elements), np.uint32)
    for row, words in zip(bits, states, strict=True):
        counter, keys = words[:2].view(np.uint64), words[2:]
        # the key is four words; of 22 the rest is folded into them
        key = np.bitwise_xor.reduce(np.resize(keys, (-(-len(keys) // 4), 4)), 0).view(np.uint64)
        block = np.array([0, counter[0], 0, 0], np.uint64)
        philox = np.random.Philox(key=key, counter=block)
        row[:] = np.random.Generator(philox).integers(0, 2**32, len(row), np.uint32)
        counter += np.uint64(1)
    return bits


def rng(dst: NkiTensor, engine: engine = engine.vector, name: str | None = None) -> NkiInstruction:
    """dst = random bits: the lowest of 32 that its integer dtype holds, on VectorE or GpSimdE.

    GpSimdE from NeuronCore-v3 on, and into SBUF only.
    """
    core = running.active("nki.isa.rng")
    return core.issue(_rng, (dst,), (engine,), name)


def _rng(core: Core, dst: NkiTensor, asked: engine) -> Form:
    chosen = engine_of(asked, Engine.VECTOR)
    checks.engine_runs("rng", chosen, Engine.VECTOR, Engine.GPSIMD)
    if chosen is Engine.GPSIMD:
        checks.generation("rng", core.machine, 3, "engine.gpsimd", "use engine.vector")
    checked("rng", chosen, dst=dst)
    checks.dtype_in("rng", "dst", dst, *_INTEGERS)

    def run(dst: NkiTensor) -> None:
        target = raw(dst)
        target[...] = _draw(core, chosen, dst).astype(target.dtype).reshape(target.shape)

    return Form("rng", chosen, free_cycles(dst), run=run)


def dropout(
    dst: NkiTensor, data: NkiTensor, prob: Scalar, name: str | None = None
) -> NkiInstruction:
    """dst = data with elements set to 0 at random, on VectorE; both have one dtype.

    `prob`, the probability of a 0, is a number from 0 to 1 or a tile [P, 1]: fp32 where data is of
    integers, else of any float type.
    """
    core = running.active("nki.isa.dropout")
    return core.issue(_dropout, (dst, data, *tiles_of(prob)), (marks_of(prob),), name)


def _dropout(core: Core, dst: NkiTensor, data: NkiTensor, *rest: Any) -> Form:
    *tiles, marks = rest
    checked("dropout", Engine.VECTOR, dst=dst, data=data)
    checks.same_elements("dropout", {"dst": dst, "data": data})
    checks.same_dtype("dropout", dst, data)
    scalar_tiles("dropout", data, tiles, *(_FLOATS if data.dtype.is_float else ("float32",)))
    if marks[0] is not None:
        checks.probability(marks[0][0])

    def run(dst: NkiTensor, data: NkiTensor, *tiles: NkiTensor) -> None:
        target, source = raw(dst), flat(raw(data))
        drawn = _draw(core, Engine.VECTOR, data) * 2.0**-32  # float64: exact, below 1
        dropped = drawn < scalar(given(marks, tiles)[0], drawn)
        target[...] = np.where(dropped, source.dtype.type(0), source).reshape(target.shape)

    return Form("dropout", Engine.VECTOR, free_cycles(dst), run=run)


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Seed VectorE's generator with a tile [1, 1] of 32 bits."""
    core = running.active("nki.isa.set_rng_seed")
    return core.issue(_set_seed, (src_seeds,), (), name)


def _set_seed(core: Core, seed: NkiTensor) -> Form:
    checked("set_rng_seed", Engine.VECTOR, src_seeds=seed)
    checks.one_element("set_rng_seed", seed)
    checks.thirty_two_bits("set_rng_seed", "src_seeds", seed)

    def run(seed: NkiTensor) -> None:
        value = int(raw(seed).reshape(1).view(np.uint32)[0])
        _states(core, Engine.VECTOR)[:] = _words(np.random.default_rng(value), Engine.VECTOR)

    return Form("set_rng_seed", Engine.VECTOR, free_cycles(seed), writes=0, run=run)


def rand_set_state(
    src_seeds: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Set the generator's state of each partition of src_seeds, uint32 in SBUF.

    [P, 6] for GpSimdE, [P, 24] for VectorE. NeuronCore-v3 and later, VectorE from v4 on.
    """
    core = running.active("nki.isa.rand_set_state")
    return core.issue(_set_state, (src_seeds,), (engine,), name)


def _set_state(core: Core, seeds: NkiTensor, asked: engine) -> Form:
    chosen = _state_engine("rand_set_state", core, asked)
    checked("rand_set_state", Engine.GPSIMD, src_seeds=seeds)
    _state_tile("rand_set_state", "src_seeds", chosen, seeds)

    def run(seeds: NkiTensor) -> None:
        _states(core, chosen)[_lanes(seeds)] = flat(raw(seeds))

    return Form("rand_set_state", chosen, free_cycles(seeds), writes=0, run=run)


def rand_get_state(
    dst: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """dst = the generator's state of each of its partitions: uint32 [P, 6] or, VectorE, [P, 24].

    NeuronCore-v3 and later, VectorE from v4 on; GpSimdE writes SBUF only.
    """
    core = running.active("nki.isa.rand_get_state")
    return core.issue(_get_state, (dst,), (engine,), name)


def _get_state(core: Core, dst: NkiTensor, asked: engine) -> Form:
    chosen = _state_engine("rand_get_state", core, asked)
    checked("rand_get_state", chosen, dst=dst)
    _state_tile("rand_get_state", "dst", chosen, dst)

    def run(dst: NkiTensor) -> None:
        target = raw(dst)
        target[...] = _states(core, chosen)[_lanes(dst)].reshape(target.shape)

    return Form("rand_get_state", chosen, free_cycles(dst), run=run)


def _state_engine(opcode: str, core: Core, asked: engine) -> Engine:
    chosen = engine_of(asked, Engine.GPSIMD)
    checks.engine_runs(opcode, chosen, Engine.GPSIMD, Engine.VECTOR)
    checks.generation(opcode, core.machine, 3, "it", "use set_rng_seed")
    if chosen is Engine.VECTOR:
        checks.generation(opcode, core.machine, 4, "engine.vector", "use engine.gpsimd")
    return chosen


def _state_tile(opcode: str, operand: str, chosen: Engine, t: NkiTensor) -> None:
    checks.dtype_in(opcode, operand, t, "uint32")
    checks.free_size(opcode, operand, t, _WORDS[chosen])
    checks.dimensions(opcode, operand, t, 2)


def rand2(dst: NkiTensor, min: Scalar, max: Scalar, name: str | None = None) -> NkiInstruction:  # noqa: A002
    """dst = uniform random numbers from min to max, numbers or fp32 tiles [P, 1], on VectorE.

    Drawn in fp32, converted to dst's dtype. NeuronCore-v4.
    """
    core = running.active("nki.isa.rand2")
    return core.issue(_rand2, (dst, *tiles_of(min, max)), (marks_of(min, max),), name)


def _rand2(core: Core, dst: NkiTensor, *rest: Any) -> Form:
    *tiles, marks = rest
    checks.generation("rand2", core.machine, 4, "it", "use rng and tensor_scalar")
    checked("rand2", Engine.VECTOR, dst=dst)
    checks.dtype_in("rand2", "dst", dst, *_UNIFORM)
    scalar_tiles("rand2", dst, tiles, "float32")
    if None not in marks:
        checks.ordered_bounds(marks[0][0], marks[1][0])

    def run(dst: NkiTensor, *tiles: NkiTensor) -> None:
        share = (_draw(core, Engine.VECTOR, dst) >> 8) * np.float32(2.0**-24)
        low, high = [scalar(v, share) for v in given(marks, tiles)]
        write(dst, np.clip(low + share.astype(np.float32) * (high - low), low, high))

    return Form("rand2", Engine.VECTOR, free_cycles(dst), run=run)

"""Random numbers of VectorE and GpSimdE.

Not the hardware's generators: each partition draws from NumPy's Philox, keyed by its state words.
What holds as documented: one seed gives one sequence, partitions are independent, and a state
that is stored and set again continues where it was. Without a seed the states follow from the
launch's `seed` and the core.
"""

from __future__ import annotations

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.core import SimulatedCore
from neuroncore.hardware import PARTITIONS, Engine
from neuroncore.isa.enums import engine, engine_of
from neuroncore.isa.instruction import Scalar, instruction
from neuroncore.isa.values import flat, free_cycles, raw, scalar, write, write_bits
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate

_WORDS = {Engine.GPSIMD: 6, Engine.VECTOR: 24}
"""uint32 words of state per partition."""
_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
_UNIFORM = (
    "float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32", *_INTEGERS
)  # fmt: skip
_FLOATS = (
    "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32"
)  # fmt: skip


def _states(core: SimulatedCore, chosen: Engine) -> np.ndarray:
    """State words of all partitions of an engine: [128, 6 or 24] uint32."""
    key = f"random {chosen.name}"
    if key not in core.state:
        seeds = (core.launch.seed, core.program_id, int(chosen))
        core.state[key] = _words(np.random.default_rng(seeds), chosen)
    return core.state[key]


def _words(generator: np.random.Generator, chosen: Engine) -> np.ndarray:
    return generator.integers(0, 2**32, (PARTITIONS, _WORDS[chosen]), np.uint32)


def _partitions(t: NkiTensor) -> slice:
    return slice(t.geometry.start, t.geometry.start + t.geometry.partitions)


def _draw(core: SimulatedCore, chosen: Engine, dst: NkiTensor) -> np.ndarray:
    """32 random bits per element [P, N]; the states of the partitions move on."""
    states = _states(core, chosen)[_partitions(dst)]
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


@instruction("dst")
def rng(
    dst: NkiTensor, engine: engine = engine.vector, name: str | None = None
) -> InstructionTemplate:
    """dst = random bits: the lowest of 32 that its integer dtype holds, on VectorE or GpSimdE.

    GpSimdE from NeuronCore-v3 on, and into SBUF only.
    """
    core = running.active()
    chosen = engine_of("rng", engine, Engine.VECTOR, Engine.GPSIMD)
    if chosen is Engine.GPSIMD:
        check.feature("rng", core.machine, "gpsimd_random", "engine.gpsimd", "use engine.vector")
    check.vector("rng", chosen, dst=dst)
    check.dtype_in("rng", "dst", dst, *_INTEGERS)

    def run(dst: NkiTensor) -> None:
        write_bits(dst, _draw(core, chosen, dst))

    return InstructionTemplate(chosen, free_cycles(dst), run)


@instruction("dst")
def dropout(
    dst: NkiTensor, data: NkiTensor, prob: Scalar, name: str | None = None
) -> InstructionTemplate:
    """dst = data with elements set to 0 at random, on VectorE; both have one dtype.

    `prob`, the probability of a 0, is a number from 0 to 1 or a tile [P, 1]: fp32 where data is of
    integers, else of any float type.
    """
    core = running.active()
    check.elementwise("dropout", Engine.VECTOR, dst=dst, data=data)
    check.same_dtype("dropout", dst, data)
    check.scalars("dropout", data, [prob], *(_FLOATS if data.dtype.is_float else ("float32",)))
    check.number("dropout", "prob", prob)
    if not isinstance(prob, NkiTensor) and not 0 <= prob <= 1:
        refuse(f"dropout: prob must be 0 to 1; got {prob!r}")

    def run(dst: NkiTensor, data: NkiTensor, prob: Scalar) -> None:
        source = flat(raw(data))
        drawn = _draw(core, Engine.VECTOR, data) * 2.0**-32  # float64: exact, below 1
        write_bits(dst, np.where(drawn < scalar(prob, drawn), source.dtype.type(0), source))

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run)


@instruction()
def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> InstructionTemplate:
    """Seed VectorE's generator with a tile [1, 1] of 32 bits."""
    core = running.active()
    check.vector("set_rng_seed", Engine.VECTOR, src_seeds=src_seeds)
    check.one_element("set_rng_seed", src_seeds)
    if src_seeds.dtype.itemsize != 4:
        seen = f"{src_seeds} is {src_seeds.dtype}"
        refuse(f"set_rng_seed: src_seeds must be of a 32-bit type; {seen}")

    def run(src_seeds: NkiTensor) -> None:
        value = int(raw(src_seeds).reshape(1).view(np.uint32)[0])
        _states(core, Engine.VECTOR)[:] = _words(np.random.default_rng(value), Engine.VECTOR)

    return InstructionTemplate(Engine.VECTOR, free_cycles(src_seeds), run)


@instruction()
def rand_set_state(
    src_seeds: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None
) -> InstructionTemplate:
    """Set the generator's state of each partition of src_seeds, uint32 in SBUF.

    [P, 6] for GpSimdE, [P, 24] for VectorE. NeuronCore-v3 and later, VectorE from v4 on.
    """
    core = running.active()
    chosen = _state_engine("rand_set_state", core, engine)
    check.vector("rand_set_state", Engine.GPSIMD, src_seeds=src_seeds)
    _check_state("rand_set_state", "src_seeds", chosen, src_seeds)

    def run(src_seeds: NkiTensor) -> None:
        _states(core, chosen)[_partitions(src_seeds)] = flat(raw(src_seeds))

    return InstructionTemplate(chosen, free_cycles(src_seeds), run)


@instruction("dst")
def rand_get_state(
    dst: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None
) -> InstructionTemplate:
    """dst = the generator's state of each of its partitions: uint32 [P, 6] or, VectorE, [P, 24].

    NeuronCore-v3 and later, VectorE from v4 on; GpSimdE writes SBUF only.
    """
    core = running.active()
    chosen = _state_engine("rand_get_state", core, engine)
    check.vector("rand_get_state", chosen, dst=dst)
    _check_state("rand_get_state", "dst", chosen, dst)

    def run(dst: NkiTensor) -> None:
        write_bits(dst, _states(core, chosen)[_partitions(dst)])

    return InstructionTemplate(chosen, free_cycles(dst), run)


def _state_engine(opcode: str, core: SimulatedCore, asked: engine) -> Engine:
    chosen = engine_of(opcode, asked, Engine.GPSIMD, Engine.VECTOR)
    check.feature(opcode, core.machine, "random_state", "it", "use set_rng_seed")
    if chosen is Engine.VECTOR:
        check.feature(
            opcode, core.machine, "vector_random_state", "engine.vector", "use engine.gpsimd"
        )
    return chosen


def _check_state(opcode: str, operand: str, chosen: Engine, t: NkiTensor) -> None:
    check.dtype_in(opcode, operand, t, "uint32")
    check.free_size(opcode, operand, t, _WORDS[chosen])
    check.dimensions(opcode, operand, t, 2)


@instruction("dst")
def rand2(
    dst: NkiTensor,
    min: Scalar,  # noqa: A002 - NKI's name
    max: Scalar,  # noqa: A002
    name: str | None = None,
) -> InstructionTemplate:
    """dst = uniform random numbers from min to max, numbers or fp32 tiles [P, 1], on VectorE.

    Drawn in fp32, converted to dst's dtype. NeuronCore-v4.
    """
    core = running.active()
    check.feature("rand2", core.machine, "rand2", "it", "use rng and tensor_scalar")
    check.vector("rand2", Engine.VECTOR, dst=dst)
    check.dtype_in("rand2", "dst", dst, *_UNIFORM)
    check.scalars("rand2", dst, (min, max), "float32")
    if not isinstance(min, NkiTensor) and not isinstance(max, NkiTensor):
        check.number("rand2", "min", min)
        check.number("rand2", "max", max)
        if not min < max:
            refuse(f"rand2: min must be below max; got {min!r} and {max!r}")

    def run(dst: NkiTensor, min: Scalar, max: Scalar) -> None:  # noqa: A002
        share = (_draw(core, Engine.VECTOR, dst) >> 8) * np.float32(2.0**-24)
        low, high = scalar(min, share), scalar(max, share)
        write(dst, np.clip(low + share.astype(np.float32) * (high - low), low, high))

    return InstructionTemplate(Engine.VECTOR, free_cycles(dst), run)

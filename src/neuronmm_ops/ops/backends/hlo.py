"""A custom call as a serialized HLO module, written without a protobuf package.

Source: `xla/service/hlo.proto` and `xla/xla_data.proto` of OpenXLA; field numbers are named below.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ELEMENT_TYPES = {
    "int8": 2,
    "int32": 4,
    "float16": 10,
    "float32": 11,
    "bfloat16": 16,
    "float8_e4m3fn": 20,
}
"""PrimitiveType of xla_data.proto."""


class Array(NamedTuple):
    """Shape and dtype of an HLO value, row-major."""

    shape: tuple[int, ...]
    dtype: str

    def encode(self) -> bytes:
        """The ShapeProto: element_type 2, dimensions 3, layout 5 with minor_to_major 1."""
        minor_to_major = _bytes(1, _packed(reversed(range(len(self.shape)))))
        dimensions = _bytes(3, _packed(self.shape))
        return _integer(2, ELEMENT_TYPES[self.dtype]) + dimensions + _bytes(5, minor_to_major)


class CustomCall(NamedTuple):
    """What a custom call says besides its operands.

    Attributes:
        target: the name under which the backend knows it.
        config: backend_config, as it stands in the HLO.
        api_version: XLA's CustomCallApiVersion: 2 is status-returning (Neuron), 3 passes the config
            to a handler on the host.
    """

    target: str
    config: str
    api_version: int


def module_of(
    name: str,
    call: CustomCall,
    parameters: Sequence[Array],
    operands: Sequence[Array],
    results: Sequence[Array],
    outputs: Sequence[Array],
    aliases: Mapping[int, int] | None = None,
) -> bytes:
    """The HloModuleProto of one custom call, deterministic byte by byte.

    Args:
        name: of the module and its only computation.
        call: the custom call.
        parameters: of the computation.
        operands: what the call takes: each parameter, reshaped where the shapes differ.
        results: of the call; several are a tuple.
        outputs: of the computation: the results, reshaped where the shapes differ.
        aliases: results that are operands changed in place, each with that operand's place.
    """
    body = _Computation()
    ids = [body.parameter(array) for array in parameters]
    taken = [
        body.reshape(parameter, operand, number)
        for parameter, operand, number in zip(parameters, operands, ids, strict=True)
    ]
    root = body.custom_call(call, taken, results, aliases or {})
    if len(results) == 1:
        root = body.reshape(results[0], outputs[0], root)
    else:
        parts = [
            body.reshape(result, output, body.element(result, root, n))
            for n, (result, output) in enumerate(zip(results, outputs, strict=True))
        ]
        root = body.tuple_of(parts, outputs)
    program_shape = (
        b"".join(_bytes(1, array.encode()) for array in parameters)
        + _bytes(2, _shape_of(outputs))
        + b"".join(_text(3, f"p{number}") for number in range(len(parameters)))
    )
    own_id = root + 1
    # XLA splits names at the dot before their id, and aborts the process where there is none.
    entry = f"{name}.{own_id}"
    computation = (
        _text(1, entry)
        + b"".join(_bytes(2, instruction) for instruction in body.instructions)
        + _bytes(4, program_shape)
        + _integer(5, own_id)
        + _integer(6, root)
    )
    return (
        _text(1, entry)
        + _text(2, entry)
        + _bytes(3, computation)
        + _bytes(4, program_shape)
        + _integer(5, own_id)
        + _integer(6, own_id)
    )


class _Computation:
    """Instructions of a computation, numbered from 1."""

    def __init__(self) -> None:
        self.instructions: list[bytes] = []

    def parameter(self, array: Array) -> int:
        return self._add("parameter", array.encode(), _integer(9, len(self.instructions)))

    def reshape(self, array: Array, wanted: Array, operand: int) -> int:
        """The id of `operand` in the shape that is wanted."""
        if array == wanted:
            return operand
        return self._add("reshape", wanted.encode(), _operands([operand]))

    def custom_call(
        self,
        call: CustomCall,
        operands: Sequence[int],
        results: Sequence[Array],
        aliases: Mapping[int, int],
    ) -> int:
        """Each alias is an OutputOperandAliasing: output_shape_index 1, operand_index 2."""
        return self._add(
            "custom-call",
            _shape_of(results),
            _text(28, call.target)
            + _operands(operands)
            + _text(43, call.config)
            + b"".join(
                _bytes(74, _bytes(1, _packed([n] if len(results) > 1 else [])) + _integer(2, place))
                for n, place in aliases.items()
            )
            + _integer(77, call.api_version),
        )

    def element(self, array: Array, operand: int, number: int) -> int:
        fields = _integer(13, number) + _operands([operand])
        return self._add("get-tuple-element", array.encode(), fields)

    def tuple_of(self, operands: Sequence[int], arrays: Sequence[Array]) -> int:
        return self._add("tuple", _shape_of(arrays), _operands(operands))

    def _add(self, opcode: str, shape: bytes, fields: bytes) -> int:
        """Append an HloInstructionProto: name 1, opcode 2, shape 3, id 35. Returns the id."""
        number = len(self.instructions) + 1
        self.instructions.append(
            _text(1, f"{opcode}.{number}")
            + _text(2, opcode)
            + _bytes(3, shape)
            + _integer(35, number)
            + fields
        )
        return number


def _shape_of(arrays: Sequence[Array]) -> bytes:
    """The ShapeProto of an array, or of a tuple: element_type 2 is 13, tuple_shapes 4."""
    if len(arrays) == 1:
        return arrays[0].encode()
    return _integer(2, 13) + b"".join(_bytes(4, array.encode()) for array in arrays)


def _operands(ids: Sequence[int]) -> bytes:
    return _bytes(36, _packed(ids))


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _packed(values: Iterable[int]) -> bytes:
    return b"".join(_varint(value) for value in values)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

"""The bytes of an HLO module, read back by the rules of protobuf's wire format."""

import base64
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operands import mlp_shapes, split_call

from neuronmm_ops.ops.backends import hlo, xla
from neuronmm_ops.ops.backends.hlo import Array, CustomCall, module_of
from neuronmm_ops.ops.backends.launch import launch_of
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.plan import plan_svd_mlp, plan_xuv

CALL = CustomCall("Target", "Y29uZmln", 2)
X = Array((2, 3, 128), "bfloat16")
# xla_data.proto
PRIMITIVE_TYPES = {"int8": 2, "int32": 4, "float16": 10, "float32": 11, "bfloat16": 16}
PRIMITIVE_TYPES |= {"float8_e4m3fn": 20}
FLAT = Array((6, 128), "bfloat16")
W = Array((128, 300), "bfloat16")
RESULT = Array((6, 300), "bfloat16")
OUTPUT = Array((2, 3, 300), "bfloat16")


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def message(data):
    """Fields of a message: {number: [values]}, bytes undecoded."""
    fields, at = {}, 0
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        else:
            assert tag & 7 == 0
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def packed(data):
    values, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def product_of(call=CALL):
    """A module of a call on operands and a result of the kernel's shapes."""
    return module_of("name", call, [FLAT, W], [FLAT, W], [RESULT], [RESULT])


def shape_of(data):
    fields = message(data)
    layout = message(fields[5][0])
    return packed(fields[3][0]), fields[2][0], packed(layout[1][0])


def instructions_of(module):
    (computation,) = message(module)[3]
    return [message(instruction) for instruction in message(computation)[2]]


def test_a_module_has_one_computation_that_is_its_entry():
    module = message(product_of())
    computation = message(module[3][0])
    assert module[1] == module[2] == computation[1] == [b"name.4"]
    assert module[5] == module[6] == computation[5] == [4]
    assert computation[6] == [3]
    signature = message(computation[4][0])
    assert module[4] == computation[4]
    assert [shape_of(shape)[0] for shape in signature[1]] == [[6, 128], [128, 300]]
    assert shape_of(signature[2][0])[0] == [6, 300]
    assert signature[3] == [b"p0", b"p1"]


def test_the_custom_call_has_its_fields():
    first, second, call = instructions_of(product_of())
    assert (first[2], first[9], second[9]) == ([b"parameter"], [0], [1])
    assert (call[1], call[2]) == ([b"custom-call.3"], [b"custom-call"])
    assert shape_of(call[3][0]) == ([6, 300], 16, [1, 0])
    assert (call[28], call[43], call[77]) == ([b"Target"], [b"Y29uZmln"], [2])
    assert packed(call[36][0]) == [1, 2]


def test_other_shapes_are_reached_by_reshapes():
    found = instructions_of(module_of("name", CALL, [X, W], [FLAT, W], [RESULT], [OUTPUT]))
    assert [i[2][0].decode() for i in found] == [
        *("parameter", "parameter", "reshape", "custom-call", "reshape")
    ]
    assert [packed(i[36][0]) for i in found[2:]] == [[1], [3, 2], [4]]
    assert shape_of(found[-1][3][0])[0] == [2, 3, 300]


@given(
    shape=st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    dtype=st.sampled_from(list(hlo.ELEMENT_TYPES)),
)
def test_shapes_of_any_size(shape, dtype):
    dimensions, element_type, minor_to_major = shape_of(Array(shape, dtype).encode())
    assert tuple(dimensions) == shape
    assert element_type == PRIMITIVE_TYPES[dtype]
    assert minor_to_major == list(reversed(range(len(shape))))


@given(name=st.text(min_size=1), config=st.text(), version=st.integers(0, 2**31))
def test_texts_and_integers_come_back(name, config, version):
    found = instructions_of(product_of(CustomCall(name, config, version)))[-1]
    assert found[28][0].decode() == name
    assert found[43][0].decode() == config
    assert found[77] == [version]


def launch(op, *shapes, choices=()):
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return launch_of(SPECS[op], *split_call(op, *tensors, *choices), "trn1")


def decoded(found):
    return json.loads(base64.b64decode(xla.config_of(found), validate=True))


def test_the_config_has_the_documented_form_and_what_distinguishes_the_call():
    config = decoded(launch("xuv", (6, 200), (200, 40), (40, 64)))
    plan = plan_xuv(6, 200, 40, 64, "float32", "trn1")
    assert set(config) == {
        *("func_name", "grid", "has_collectives", "kernel_version", "klir_binary", "neuronmm")
    }
    assert config["func_name"] == plan.kernel
    assert config["klir_binary"]["binary"].startswith(f"neuronmm_ops.kernels.{plan.kernel}@")
    assert config["neuronmm"]["blocks"] == plan.arguments


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_is_in_the_config(activation):
    shapes = ((7, 64), *mlp_shapes(64, 96, 64, (8, 8, 8)))
    config = decoded(launch("svd_mlp", *shapes, choices=(activation,)))
    assert config["neuronmm"]["activation"] == activation
    plan = plan_svd_mlp(7, 64, (8, 8, 8), 96, 64, "float32", "trn1")
    assert config["func_name"] == plan.kernel


@pytest.mark.parametrize("api", [2, 3])
def test_the_module_of_a_launch_is_the_same_every_time(api):
    shapes = (2, 3, 200), (200, 40), (40, 64)
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    modules = {xla.module_for(launch("xuv", *shapes), tensors, api) for _ in range(3)}
    assert len(modules) == 1
    assert instructions_of(*modules)[-2][77] == [api]

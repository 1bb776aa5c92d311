"""What a spec derives from its operands: schema, shapes, checks and their texts."""

import pytest
import torch

from neuronmm_ops.ops.spec import Operand, OpSpec


def spec_of(*operands: Operand, **choices: tuple[str, ...]) -> OpSpec:
    def reference(x, a, b=None, mode="fast"):
        raise AssertionError("only its signature is read")

    return OpSpec(
        "op", (Operand("x", "... K", "activation"), *operands), reference, reference, choices
    )


PAIR = (Operand("a", "K r"), Operand("b", "r N"))
BIAS = Operand("b", "N", "bias", optional=True)


def test_the_schema_has_operands_then_choices():
    assert spec_of(*PAIR).schema == "op(Tensor x, Tensor a, Tensor b) -> Tensor"
    spec = spec_of(Operand("a", "K N"), BIAS, mode=("fast", "right"))
    assert spec.schema == 'op(Tensor x, Tensor a, Tensor? b=None, str mode="fast") -> Tensor'


def test_shapes_follow_the_names_of_the_sizes():
    spec = spec_of(*PAIR)
    assert spec.shapes({"K": 4, "r": 2, "N": 6}, (3, 5)) == [(3, 5, 4), (4, 2), (2, 6)]
    tensors = [torch.ones(shape) for shape in spec.shapes({"K": 4, "r": 2, "N": 6}, (0,))]
    assert spec.result_shapes(tensors) == [(0, 6)]
    assert spec.factors == (1, 2)


@pytest.mark.parametrize(
    ("shapes", "given", "words"),
    [
        (("K r", "r N"), [(4, 2), (2, 6)], None),
        (("K r", "r N"), [(5, 2), (2, 6)], "last dimension of x must equal first dimension of a"),
        (("K r", "r N"), [(4, 2), (3, 6)], "last dimension of a must equal first dimension of b"),
        (("K N", "K N"), [(4, 6), (4, 7)], "a and b must have the same number of columns"),
        (("r N", "r K"), [(2, 6), (3, 4)], "a and b must have the same number of rows"),
        (("N r", "K N"), [(6, 2), (4, 7)], "first dimension of a must equal last dimension of b"),
        (("K r", "r r"), [(4, 2), (2, 3)], "a and b must have the same number of columns"),
    ],
)
def test_sizes_of_one_name_are_equal(shapes, given, words):
    spec = spec_of(Operand("a", shapes[0]), Operand("b", shapes[1]))
    tensors = [torch.ones(3, 4), *map(torch.ones, given)]
    if words is None:
        spec.check(*tensors)
        return
    with pytest.raises(ValueError, match=rf"^op: {words}, got \w \[\d, \d\] and \w \[\d, \d\]$"):
        spec.check(*tensors)


def test_a_bias_is_a_vector_and_a_choice_one_of_its_values():
    spec = spec_of(Operand("a", "K N"), BIAS, mode=("fast", "right"))
    x, a = torch.ones(3, 4), torch.ones(4, 6)
    for bias in (None, torch.ones(6)):
        spec.check(x, a, bias, "right")
    for shape in ((), (5,), (6, 6)):
        with pytest.raises(ValueError, match=r"^op: b must have shape \[N\] with N the columns"):
            spec.check(x, a, torch.ones(shape), "fast")
    with pytest.raises(ValueError, match=r"^op: mode must be one of fast, right; got 'slow'$"):
        spec.check(x, a, None, "slow")

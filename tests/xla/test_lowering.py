"""Every op on XLA tensors becomes one custom call that says which kernel it is."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch_xla
from graphs import graph_hash, lowered
from host import launch_of
from operands import names_of, split_call
from torch_xla import _XLAC
from torch_xla.core import xla_builder

import neuronmm_ops as nm
from neuronmm_ops import kernels
from neuronmm_ops.ops.backends import launch, xla
from neuronmm_ops.ops.backends.hlo import Array, CustomCall, module_of
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.plan import plan_op

MLP = ((256, 32), (32, 300), (256, 48), (48, 300), (300, 40), (40, 256))


def on(device, *shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]


def test_the_config_of_a_call(device):
    x, u, v = on(device, (2, 3, 200), (200, 40), (40, 64))
    (call,) = lowered(nm.xuv(x, u, v)).calls
    plan = plan_op("xuv", 6, ((200, 40), (40, 64)), "float32", "trn2", 2)
    own = call.config["neuronmm"]
    assert (own["op"], own["M"], own["K"], own["ranks"], own["N"]) == ("xuv", 6, 200, [40], 64)
    assert (own["dtype"], own["bias"]) == ("float32", False)
    assert call.config["func_name"] == plan.kernel
    assert (call.config["grid"], call.config["kernel_version"]) == ([2], 1)
    assert call.config["has_collectives"] is False
    assert call.config["klir_binary"]["output_names"] == ["y"]
    assert launch_of(call.config).plan.arguments == plan.arguments


GATED = ((256, 300), (160, 300), (300, 64))
QKV = ((256, 32), (32, 96), (256, 16), (16, 40), (256, 24), (24, 64))
X_UP = {"others": (("x_up", (-1, 160), ""),)}


@pytest.mark.parametrize(
    ("op", "shapes", "options", "plan", "says"),
    [
        ("xuv", ((2, 3, 200), (200, 40), (40, 64)), {}, {}, ["f32[6,64]"]),
        ("xw", ((5, 96), (96, 70), (70,)), {}, {"dtype": "bfloat16"}, ["bf16[5,70]"]),
        ("svd_mlp", ((7, 256), *MLP), {"activation": "gelu"}, {}, []),
        ("mlp", ((2, 5, 256), *GATED, (2, 5, 160)), {"activation": "relu"}, X_UP, ["f32[10,160]"]),
        ("svd_qkv", ((7, 256), *QKV), {}, {}, ["f32[7,200]"]),
        ("svd_qkv", ((7, 256), *QKV), {"bias_value": (64,)}, {}, ["f32[7,200]", "f32[64]"]),
    ],
)
def test_each_op_is_one_call_of_its_kernel(op, shapes, options, plan, says, device):
    dtype = plan.get("dtype", "float32")
    tensors = on(device, *shapes, dtype=getattr(torch, dtype))
    given = {n: v if isinstance(v, str) else on(device, v)[0] for n, v in options.items()}
    (call,) = lowered(getattr(nm, op)(*tensors, **given)).calls
    names = [*names_of(op)[: len(shapes)], *[n for n in options if n != "activation"]]
    assert call.config["klir_binary"]["input_names"] == names
    assert call.config["neuronmm"].get("activation") == options.get("activation")
    assert call.config["neuronmm"]["bias"] is any(name.startswith("bias") for name in names)
    M, matrices = math.prod(shapes[0][:-1]), shapes[1 : 1 + len(SPECS[op].factors)]
    expected = plan_op(op, M, matrices, **{"dtype": dtype, "target": "trn2", "lnc": 2} | plan)
    assert launch_of(call.config).plan.problem == expected.problem
    for text in says:
        assert text in call.text


def test_one_kernel_twice_and_with_other_shapes(device, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    x, u, v = on(device, (4, 96), (96, 16), (16, 96))
    y = nm.xuv(nm.xuv(nm.xuv(x, u, v), u, v)[:2], u, v)
    first, second, third = lowered(y).calls
    assert first.config == second.config
    # but for the blocks, which are of the number of tokens
    same = {"M": 4, "blocks": first.config["neuronmm"]["blocks"]}
    assert third.config["neuronmm"] | same == first.config["neuronmm"]
    assert third.config["neuronmm"]["M"] == 2


@pytest.mark.parametrize("api", [xla.API_NEURON, xla.API_HOST])
def test_the_api_version_is_a_parameter(device, api):
    x, w = on(device, (2, 8), (8, 8))
    with xla.api_version(api):
        (call,) = lowered(nm.xw(x, w)).calls
    assert (call.target, call.api_version) == ("AwsNeuronCustomNativeKernel", api)


def test_the_kernels_source_is_in_the_config_and_the_hash(device, monkeypatch):
    tensors = on(device, (2, 8), (8, 8))
    torch_xla.sync()
    y = nm.xw(*tensors)
    (call,) = lowered(y).calls
    name, _, fingerprint = call.config["klir_binary"]["binary"].partition("@")
    assert name == f"neuronmm_ops.kernels.{call.config['func_name']}"
    assert re.fullmatch("[0-9a-f]{16}", fingerprint)
    monkeypatch.setattr(xla, "_computations", {})
    monkeypatch.setattr(kernels, "source_fingerprint", lambda: "0" * 16)
    assert graph_hash(nm.xw(*tensors)) != graph_hash(y)


@pytest.mark.parametrize("shape", [(200,), (1, 200), (0, 200), (2, 0, 200), (2, 1, 3, 200)])
def test_any_leading_dimensions(device, shape):
    x, u, v = on(device, shape, (200, 40), (40, 64))
    y = nm.xuv(x, u, v)
    assert y.shape == (*shape[:-1], 64)
    assert len(lowered(y).calls) == (0 if 0 in shape else 1)


def test_what_distinguishes_two_calls_distinguishes_their_hashes(device, monkeypatch):
    x, u, v, bias = on(device, (4, 256), (256, 64), (64, 256), (256,))
    square = on(device, (256, 256))[0]
    halves = [tensor.bfloat16() for tensor in (x, u, v)]
    mlp = on(device, *MLP)
    torch_xla.sync()
    hashes = [
        graph_hash(nm.xuv(x, u, v)),
        graph_hash(nm.xuv(x, u, v, bias)),
        graph_hash(nm.xw(x, square)),
        graph_hash(nm.xuv(x[:3], u, v)),
        graph_hash(nm.xuv(*halves)),
        graph_hash(nm.svd_mlp(x, *mlp)),
        graph_hash(nm.svd_mlp(x, *mlp, activation="relu")),
    ]
    for name, value in (("PLATFORM_TARGET_OVERRIDE", "trn3"), ("LOGICAL_NC_CONFIG", "1")):
        monkeypatch.setenv(f"NEURON_{name}", value)
        hashes.append(graph_hash(nm.xuv(x, u, v)))
    assert len(set(hashes)) == len(hashes)
    monkeypatch.undo()
    xla._computations.clear()
    assert graph_hash(nm.xuv(x, u, v)) == hashes[0]


def test_the_plan_alone_distinguishes(device):
    given = [torch.empty(shape, device="meta") for shape in ((4, 256), (256, 64), (64, 256))]
    planned = launch.launch_of(SPECS["xuv"], *split_call("xuv", *given), "trn1")
    (name, value), *rest = planned.plan.blocks
    blocks = ((name, int(value) // 2), *rest)
    other = replace(planned, plan=replace(planned.plan, blocks=blocks))
    hashes = set()
    tensors = on(device, (4, 256), (256, 64), (64, 256))
    torch_xla.sync()
    for which in (planned, other):
        computation = xla._computation(which, tensors)
        (y,) = _XLAC._xla_user_computation("xla::same_name", tensors, computation)
        hashes.add(graph_hash(y))
    assert len(hashes) == 2


def test_cores_and_target_come_from_the_environment(device, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    x, w = on(device, (512, 256), (256, 256))
    (call,) = lowered(nm.xw(x, w)).calls
    assert call.config["grid"] == [2]
    assert call.config["neuronmm"]["target"] == "trn2"
    assert call.config["neuronmm"]["lnc"] == 2


def test_a_call_that_cannot_run_here_warns_once(device):
    xla._warn_where_it_cannot_run.cache_clear()
    with xla.api_version(xla.API_NEURON):
        with pytest.warns(UserWarning, match="can be read or exported, not run; set NEURONMM_XLA"):
            nm.xw(*on(device, (3, 7), (7, 5)))
        nm.xw(*on(device, (3, 7), (7, 6)))


def test_composite_is_asked_for(device, monkeypatch):
    monkeypatch.setenv("NEURONMM_XLA", "composite")
    x, u, v = on(device, (2, 3, 200), (200, 40), (40, 64))
    graph = lowered(nm.xuv(x, u, v))
    assert (graph.calls, graph.dots) == ([], 2)
    x, *factors = on(device, (7, 256), *MLP)
    graph = lowered(nm.svd_mlp(x, *factors, activation="gelu"))
    assert (graph.calls, graph.dots) == ([], 6)


def test_other_ways_are_refused(device, monkeypatch):
    monkeypatch.setenv("NEURONMM_XLA", "fast")
    with pytest.raises(ValueError, match="NEURONMM_XLA"):
        nm.xw(*on(device, (2, 8), (8, 8)))


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        *[(n, v, True) for n in ("USE_BF16", "DOWNCAST_BF16") for v in ("1", "true", "01")],
        *[("USE_BF16", value, False) for value in ("", "0", "false", "False", "no")],
    ],
)
def test_dtypes_changed_behind_the_ops_are_refused(device, monkeypatch, name, value, changes):
    monkeypatch.setattr(xla, "_computations", {})
    monkeypatch.setenv(f"XLA_{name}", value)
    if not changes:
        assert len(lowered(nm.xw(*on(device, (2, 8), (8, 8)))).calls) == 1
        return
    with pytest.raises(RuntimeError, match=f"XLA_{name}={value} changes them; unset it"):
        nm.xw(*on(device, (2, 8), (8, 8)))


def test_what_no_kernel_takes_is_refused(device):
    x, w = on(device, (2, 8), (8, 8), dtype=torch.float64)
    with pytest.raises(TypeError, match="takes bfloat16, float16 and float32"):
        nm.xw(x, w)
    x, w = on(device, (2, 8), (9, 8))
    with pytest.raises(ValueError, match="last dimension of x"):
        nm.xw(x, w)
    x, w = on(device, (2, 8), (8, 8))
    lowered(nm.xw(x, w))
    with pytest.raises(TypeError, match="same device"):
        nm.xw(x, w.cpu())  # of the shapes of the call before


def test_an_hlo_module_survives_xla():
    module = module_of(
        "two_words",
        CustomCall("SomeTarget", "Y29uZmln", 3),
        [Array((2, 3, 128), "bfloat16"), Array((), "float32")],
        [Array((6, 128), "bfloat16"), Array((), "float32")],
        [Array((6, 300), "float16")],
        [Array((2, 3, 300), "float16")],
    )
    computation = xla_builder.computation_from_module_proto("two_words", module)
    text = xla_builder.get_computation_hlo(computation)
    for part in (
        "bf16[2,3,128]{2,1,0} parameter(0)",
        "f32[] parameter(1)",
        "bf16[6,128]{1,0} reshape(",
        'custom_call_target="SomeTarget"',
        "api_version=API_VERSION_STATUS_RETURNING_UNIFIED",
        'backend_config="Y29uZmln"',
        "ROOT %reshape.5 = f16[2,3,300]{2,1,0} reshape(",
    ):
        assert part in text, text

"""PackedLinear: the same results from matrices in the CPU's order, and what it refuses."""

import copy

import pytest
import torch
from tolerances import assert_close_to_oracle
from torch import nn
from torch.testing import assert_close

import neuronmm_ops as nm
from neuronmm_ops.nn import PackedLinear, StoredLinear, SVDLinear, pack_, relayout_
from neuronmm_ops.ops.backends.cpu import is_x86, multiplies_fast

BF16, FP32 = torch.bfloat16, torch.float32
UNITS = pytest.mark.skipif(not multiplies_fast(BF16), reason="bfloat16 is not packed here")
X86 = pytest.mark.skipif(not is_x86(), reason="float32 is not packed here")
K, N = 200, 96


def pair(storage=None, bias=True, dtype=BF16, rank=48):
    torch.manual_seed(0)
    return SVDLinear(K, N, rank, bias, dtype=dtype, storage=storage)


def stored(storage="int4", bias=True, dtype=BF16, columns=N):
    torch.manual_seed(0)
    return StoredLinear.from_linear(nn.Linear(K, columns, bias, dtype=dtype), storage)


def dense(dtype=BF16):
    torch.manual_seed(0)
    return nn.Linear(K, N, dtype=dtype)


def packed(layer):
    return pack_(nn.Sequential(copy.deepcopy(layer)))


@UNITS
@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (130, K), (0, K)])
@pytest.mark.parametrize("layer", [pair(), pair(bias=False), dense()])
def test_bfloat16_is_the_same_bit_for_bit(shape, layer):
    x = torch.randn(shape).to(BF16)
    made = packed(layer)
    assert type(made[0]) is PackedLinear
    with torch.inference_mode():
        assert torch.equal(made(x), relayout_(copy.deepcopy(layer))(x))


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (130, K), (0, K)])
@pytest.mark.parametrize("layer", [stored(), stored(bias=False), pair("int4")])
def test_int4_is_rounded_as_bfloat16(layer, shape):
    x, made = torch.randn(shape).to(BF16), packed(layer)
    assert type(made[0]) is PackedLinear
    wide = copy.deepcopy(layer).to_linear() if layer.rank is None else layer
    with torch.inference_mode():
        expected = layer(x) if layer.rank else nn.functional.linear(x, wide.weight, wide.bias)
        assert made(x).dtype == BF16
        assert_close(made(x), expected, rtol=2e-2, atol=2e-2)


@X86
@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (130, K), (0, K)])
@pytest.mark.parametrize("layer", [pair(dtype=FP32), pair(bias=False, dtype=FP32), dense(FP32)])
def test_float32_is_summed_as_exactly(shape, layer):
    x, made, plain = torch.randn(shape), packed(layer), relayout_(copy.deepcopy(layer))
    assert type(made[0]) is PackedLinear
    with torch.no_grad():
        oracle = copy.deepcopy(layer).double()(x.double())
        assert_close_to_oracle(made(x), oracle, plain(x))


@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=UNITS), pytest.param(FP32, marks=X86)])
def test_a_model_is_packed_with_its_tied_head(dtype):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(ids).logits
        after = pack_(model)(ids).logits
    assert_close(after, before, rtol=0, atol=0 if dtype == BF16 else 1e-6)
    assert type(model.model.embed_tokens.weight) is nn.Parameter
    assert sum(type(each) is PackedLinear for each in model.modules()) == 8


def test_weights_that_the_code_reads_stay_where_they_are():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=8))
    config = transformers.RwkvConfig(**sizes, rescale_every=2)  # layers divide by 2 as they run
    rwkv = transformers.RwkvForCausalLM(config)
    encoder = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
    x, ids = torch.randn(2, 5, 32), torch.arange(9)[None]
    for model, given in ((mamba, ids), (rwkv, ids), (encoder, x)):
        with torch.inference_mode():
            expected, y = (m(given) for m in (model.eval(), pack_(copy.deepcopy(model))))
        assert_close(getattr(y, "logits", y), getattr(expected, "logits", expected))


def test_a_gated_mlp_and_a_shared_layer_are_packed():
    mlp = nm.SVDMLP(64, 128, (32, 48, 16), dtype=BF16, storage="int4")
    model = nn.ModuleDict({"mlp": mlp, "again": mlp.up_proj})
    x = torch.randn(3, 64).to(BF16)
    with torch.inference_mode():
        expected = mlp(x)
        pack_(model)
        assert_close(mlp(x), expected, rtol=2e-2, atol=2e-2)
    assert type(mlp.up_proj) is PackedLinear
    assert model["again"] is mlp.up_proj


@pytest.mark.parametrize(
    "layer",
    [
        pair(dtype=torch.float64),
        pair("int4", dtype=torch.float32),
        pair("fp8"),
        dense(torch.float64),
        stored("int8"),
        stored(columns=40),  # torch's kernel takes multiples of 16
        pair("int4", rank=40),
    ],
)
def test_what_has_no_quicker_order_is_laid_out(layer):
    made = packed(layer)
    assert type(made[0]) is type(layer)
    for name, value in layer.state_dict().items():
        assert torch.equal(made[0].state_dict()[name], value)


@pytest.mark.parametrize("layer", [stored(), pytest.param(pair(), marks=UNITS)])
def test_hooks_stay_and_the_rest_is_refused(layer):
    seen, x = [], torch.randn(2, K).to(BF16)
    layer.register_forward_hook(lambda *_: seen.append(1))
    model = packed(layer)
    with torch.no_grad():
        model(x)
    assert seen
    assert model.to("cpu", BF16) is model
    for call in (model.float, lambda: model.to("meta")):
        with pytest.raises(ValueError, match=r"stays torch\.bfloat16 .*move it before pack_"):
            call()
    with pytest.raises(ValueError, match="save it before pack_"):
        model.state_dict()
    with pytest.raises(ValueError, match="load them before pack_"):
        model.load_state_dict(nn.Sequential(layer).state_dict())
    for wrong in (x.float(), x[:, 1:], torch.tensor(1.0, dtype=BF16)):
        with pytest.raises(
            ValueError, match=r"^a packed layer takes x \[\.\.\., 200\] in torch.bfl"
        ):
            model(wrong)
    with nm.use_impl("simulated"), pytest.raises(RuntimeError, match="not simulated"):
        model(x)
    with pytest.raises(RuntimeError, match=r"derivative|autograd"):
        model(x.requires_grad_()).sum().backward()
    with pytest.raises(ValueError, match="got a layer; wrap it"):
        pack_(layer)


@pytest.mark.parametrize("layer", [stored(), pytest.param(pair(), marks=UNITS)])
def test_it_is_compiled_whole(layer):
    model, x = packed(layer), torch.randn(3, K).to(BF16)
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))

"""Second moments: their values, the number of products, and the model's state afterwards."""

import pytest
import torch
from slow_cpu import NarrowProducts, make_slow
from tolerances import assert_close_to_oracle, assert_same_in_fp64
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import FAMILIES, GatedMLP, causal_lm, token_batches

from neuronmm_ops import NonFiniteError, collect_moments
from neuronmm_ops.compress import calibrate, running
from neuronmm_ops.compress.batches import fingerprint
from neuronmm_ops.nn import dense_linears

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def batches(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 8, generator=generator).to(dtype) for _ in range(count)]


def inputs_and_outputs(
    model: nn.Module, names: tuple[str, ...], data: list[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return every named module's rows in fp64, collected without the code under test."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, y, name=name: seen[name].append(
                (args[0].flatten(0, -2).double(), y.flatten(0, -2).double())
            )
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in data:
            model(batch)
    for handle in handles:
        handle.remove()
    return {
        name: tuple(torch.cat(part) for part in zip(*pairs, strict=True))
        for name, pairs in seen.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_moments_are_exact_in_fp64(dtype, bias):
    model = GatedMLP(bias=bias).to(dtype)
    data = batches(dtype=dtype)
    rows = inputs_and_outputs(model, PROJECTIONS, data)
    for side in ("input", "output"):
        moments = dict(collect_moments(model, dict.fromkeys(PROJECTIONS, side), data))
        assert list(moments) == list(PROJECTIONS)
        for name, moment in moments.items():
            x, y = rows[name]
            linear = model.get_submodule(name)
            if bias:
                y = y - linear.bias.double()
            rows_of = x if side == "input" else y
            expected = rows_of.t() @ rows_of
            assert moment.matrix.dtype == torch.float64
            assert (moment.side, moment.tokens) == (side, 30)
            if dtype == torch.float64:
                assert_same_in_fp64(moment.matrix, expected)
                continue
            # Products of fp32 sums; bf16 activations are exact in fp32.
            low = (narrow := rows_of.float()).t() @ narrow
            magnitude = rows_of.abs().t() @ rows_of.abs()
            assert_close_to_oracle(moment.matrix.float(), expected, low, magnitude)


def test_one_tensor_that_is_an_output_and_an_input_has_two_moments():
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4))
    data = batches()
    moments = dict(collect_moments(model, {"0": "output", "1": "input"}, data))
    assert {name: moment.side for name, moment in moments.items()} == {"0": "output", "1": "input"}
    rows = inputs_and_outputs(model, ("0",), data)["0"][1]
    for moment in moments.values():
        assert (moment.matrix - rows.t() @ rows).norm() < 1e-5 * moment.matrix.norm()


def test_the_output_moment_is_that_of_the_weight():
    model = nn.Sequential(nn.Linear(8, 4, dtype=torch.float64))
    with torch.no_grad():
        model[0].bias.fill_(1e3)
    data = batches(dtype=torch.float64)
    x = torch.cat([b.flatten(0, -2) for b in data])
    w = model[0].weight.detach()
    ((_, moment),) = collect_moments(model, {"0": "output"}, data)
    assert_same_in_fp64(moment.matrix, w @ (x.t() @ x) @ w.t())


class CountGrams(TorchDispatchMode):
    """Count products of a matrix and its own transpose."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.count += args[0].data_ptr() == args[1].data_ptr()
        return func(*args, **(kwargs or {}))


def test_gate_and_up_share_one_product():
    model, data = GatedMLP(), batches()
    with CountGrams() as grams:
        moments = dict(collect_moments(model, dict.fromkeys(PROJECTIONS, "input"), data))
    assert grams.count == 2 * len(data)
    assert moments["gate_proj"] is moments["up_proj"]
    assert moments["gate_proj"] is not moments["down_proj"]


class TwoInputs(nn.Module):
    """Both Linears are given the same tensor, in later batches different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 8)
        self.up_proj = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        other = x if self.calls < 3 else x * 2
        return self.gate_proj(x) + self.up_proj(other)


def test_moments_part_where_the_inputs_do():
    data = batches(4, torch.float64)
    model = TwoInputs().double()
    moments = dict(collect_moments(model, {"gate_proj": "input", "up_proj": "input"}, data))
    grams = [(row := x.flatten(0, -2)).t() @ row for x in data]
    factors = {"gate_proj": (1, 1, 1, 1), "up_proj": (1, 1, 4, 4)}
    for name, weights in factors.items():
        expected = sum(weight * gram for weight, gram in zip(weights, grams, strict=True))
        assert_same_in_fp64(moments[name].matrix, expected)
        assert moments[name].tokens == 40


def test_a_linear_called_twice_counts_twice():
    class Twice(GatedMLP):
        def forward(self, x):
            return super().forward(x) + self.down_proj(self.gate_proj(x))

    data = batches(2)
    moments = dict(collect_moments(Twice(), {"gate_proj": "input", "up_proj": "input"}, data))
    assert (moments["gate_proj"].tokens, moments["up_proj"].tokens) == (40, 20)
    assert torch.equal(moments["gate_proj"].matrix, 2 * moments["up_proj"].matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_multiplied_in_a_slow_dtype(monkeypatch, dtype):
    make_slow(monkeypatch)
    model, data = causal_lm().to(dtype), token_batches(2)
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    with NarrowProducts() as products:
        moments = dict(collect_moments(model, dict.fromkeys(names, "input"), data))
    assert products.shapes == []
    assert all(p is before[n][0] and p.equal(before[n][1]) for n, p in model.named_parameters())
    wide = dict(collect_moments(causal_lm(), dict.fromkeys(names, "input"), data))
    for name, moment in moments.items():
        assert (moment.matrix - wide[name].matrix).norm() < 0.1 * wide[name].matrix.norm()


def test_a_model_without_slow_dtypes_is_left_to_torch(monkeypatch):
    make_slow(monkeypatch)
    monkeypatch.setattr(running, "WideProducts", None)
    list(collect_moments(GatedMLP(), {"gate_proj": "input"}, batches()))


class InPlaceResidual(nn.Module):
    """Changes the tensor that both Linears are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.first(x)
        x += self.second(x)
        return x


@pytest.mark.parametrize("inference", [True, False])
def test_a_tensor_changed_in_place_is_measured_again(inference):
    class Model(InPlaceResidual):
        def forward(self, x):
            with torch.inference_mode(inference):
                return super().forward(x)

    model, data = Model(), batches()
    names = ("first", "second")
    expected = [
        sum((r := row.flatten(0, -2).double()).t() @ r for row in rows)
        for rows in (data, [x + model.first(x).detach() for x in data])
    ]
    moments = dict(collect_moments(model, dict.fromkeys(names, "input"), data))
    for name, matrix in zip(names, expected, strict=True):
        assert_close_to_oracle(moments[name].matrix.float(), matrix, matrix.float())


def test_several_passes_give_the_same_moments(monkeypatch):
    model, data = GatedMLP(), batches()
    sides = {"gate_proj": "input", "up_proj": "output", "down_proj": "input"}
    expected = dict(collect_moments(model, sides, data))
    passes, told = [], []
    model.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(calibrate, "MAX_MOMENT_BYTES", 1)
    moments = dict(collect_moments(model, sides, data, lambda *args: told.append(args)))
    assert len(passes) == 3 * len(data)
    assert told == [("calibrate", done, 9) for done in range(1, 10)]
    for name in PROJECTIONS:
        assert torch.equal(moments[name].matrix, expected[name].matrix)


def test_of_no_linear_nothing_is_run():
    model = GatedMLP()
    model.register_forward_hook(lambda *_: pytest.fail("it ran"))
    assert list(collect_moments(model, {}, batches())) == []


def test_the_budget_decides_how_many_passes(monkeypatch):
    model, passes = GatedMLP(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    # gate_proj and up_proj share one matrix of 512 bytes; down_proj's is four times as large.
    monkeypatch.setattr(calibrate, "MAX_MOMENT_BYTES", 8 * 8 * 8 + 1)
    list(collect_moments(model, dict.fromkeys(PROJECTIONS, "input"), batches(1)))
    assert len(passes) == 2


def masked_batches():
    ids = token_batches(3)
    masks = [(torch.arange(32) < length).long().expand(4, 32) for length in (32, 20, 7)]
    return [{"input_ids": x, "attention_mask": m} for x, m in zip(ids, masks, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [token_batches, masked_batches])
def test_layers_of_a_decoder_run_one_by_one_where_moments_need_room(family, given, monkeypatch):
    """To the bit, and each layer once."""
    model, data, told = causal_lm(family).train(), given(), []
    sides = {n: side_of(n) for n in dense_linears(model) if n != "lm_head"}
    expected = dict(collect_moments(model, sides, data))
    calls = {layer: [] for layer in model.model.layers}
    for layer, list_of in calls.items():
        layer.register_forward_hook(lambda module, *_, own=list_of: own.append(module.training))
    monkeypatch.setattr(calibrate, "MAX_MOMENT_BYTES", 8 * 8 * 32**2)
    found = dict(collect_moments(model, sides, data, lambda *args: told.append(args)))
    assert list(found) == list(expected)
    assert all(torch.equal(found[n].matrix, expected[n].matrix) for n in expected)
    assert [found[n].tokens for n in found] == [expected[n].tokens for n in found]
    trial = 2  # of one row: whole, and one by one
    assert [len(own) for own in calls.values()] == [len(data) + trial] * 2
    assert not any(any(own) for own in calls.values())
    assert model.training
    total = 2 * len(data)
    assert told == [("calibrate", done, total) for done in range(1, total + 1)]


def side_of(name):
    return "output" if "down" in name else "input"


def test_a_layer_whose_moments_need_room_runs_again(monkeypatch):
    model, data = causal_lm(), token_batches()
    sides = dict.fromkeys((n for n in dense_linears(model) if "layers.1" in n), "input")
    expected = dict(collect_moments(model, sides, data))
    calls, told = [], []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(calibrate, "MAX_MOMENT_BYTES", 1)
    found = dict(collect_moments(model, sides, data, lambda *args: told.append(args)))
    assert all(torch.equal(found[n].matrix, expected[n].matrix) for n in expected)
    assert len(calls) > 2 * len(data)
    assert told[-1] == ("calibrate", 2 * len(data), 2 * len(data))


@pytest.mark.parametrize("which", ["head", "odd"])
def test_other_models_run_whole(which, monkeypatch):
    """Where a Linear is in no layer, or layers alone give another output than the model."""
    model, data = causal_lm(), token_batches()
    if which == "odd":
        model.model.register_forward_hook(
            lambda module, args, output: setattr(
                output, "last_hidden_state", output.last_hidden_state + torch.rand(1)
            )
        )
    names = [n for n in dense_linears(model) if which == "head" or n != "lm_head"]
    expected = dict(collect_moments(model, dict.fromkeys(names, "input"), data))
    passes = []
    model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(calibrate, "MAX_MOMENT_BYTES", 8 * 64**2 * 2)
    found = dict(collect_moments(model, dict.fromkeys(names, "input"), data))
    assert len(passes) >= 2 * len(data)
    for name in names:
        if name != "lm_head":
            assert torch.equal(found[name].matrix, expected[name].matrix)


def test_the_model_runs_in_eval_mode_without_gradients_and_is_restored():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.Linear(8, 8))
    model[0].eval()
    modes = []
    model[1].register_forward_hook(
        lambda module, _, y: modes.append((module.training, y.requires_grad))
    )
    first = dict(collect_moments(model, {"2": "input"}, batches()))
    assert set(modes) == {(False, False)}
    assert [m.training for m in model.modules()] == [True, False, True, True]
    second = dict(collect_moments(model, {"2": "input"}, batches()))
    assert torch.equal(first["2"].matrix, second["2"].matrix)


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_activations_name_the_layer(side, value):
    model = GatedMLP()
    model.train()
    with torch.no_grad():
        model.up_proj.weight[0, 0] = value
    name = "down_proj" if side == "input" else "up_proj"
    with pytest.raises(NonFiniteError, match=f"^{name}: {side} activations must be finite"):
        list(collect_moments(model, dict.fromkeys(PROJECTIONS, side), batches()))
    assert hook_count(model) == 0
    assert all(module.training for module in model.modules())


def test_a_linear_that_is_not_called_is_named():
    model = GatedMLP()
    model.unused = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="unused was not called during calibration"):
        list(collect_moments(model, {"gate_proj": "input", "unused": "input"}, batches()))


def test_only_the_body_of_a_transformers_model_runs():
    model, called = causal_lm(), []
    model.lm_head.register_forward_hook(lambda *_: called.append("lm_head"))
    name = "model.layers.1.mlp.down_proj"
    ((_, moment),) = collect_moments(model, {name: "input"}, token_batches(2))
    assert moment.tokens == 2 * 4 * 32
    assert not called
    list(collect_moments(model, {name: "input", "lm_head": "input"}, token_batches(2)))
    assert called == ["lm_head"] * 2


def test_fingerprints_tell_batches_apart():
    a, b = torch.arange(6).reshape(2, 3), torch.arange(6).reshape(3, 2)
    prints = [
        fingerprint(x) for x in ([a], [b], [a, b], [b, a], [a.int()], [a + 1], [a.t()], [a.float()])
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint([a]) == fingerprint([a.clone()])
    assert fingerprint([a.t()]) == fingerprint([a.t().contiguous()])

"""`use_impl`: which implementation runs, from when to when."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from operands import make, mlp_shapes

from neuronmm_ops import ops
from neuronmm_ops.ops.backends import simulated
from neuronmm_ops.ops.backends.launch import implementations
from neuronmm_ops.ops.backends.simulated import active_impl


@pytest.fixture
def calls(monkeypatch) -> Iterator[Counter[str]]:
    """Let `simulated` run the reference and count its calls."""
    counter: Counter[str] = Counter()

    def count(spec, tensors, choices):
        counter[spec.name] += 1
        return spec.reference(*spec.joined(tensors, choices))

    monkeypatch.setattr(simulated, "implementation", lambda target: implementations(count))
    yield counter
    ops.use_impl("reference")


def run_all() -> list[torch.Tensor]:
    x = make((2, 4))
    return [
        ops.xuv(x, make((4, 3)), make((3, 5)), make((5,))),
        ops.xw(x, make((4, 5))),
        ops.svd_mlp(x, *(make(shape) for shape in mlp_shapes(4, 6, 5)), activation="gelu"),
    ]


def test_a_with_block_runs_the_implementation_and_restores(calls):
    assert active_impl() == "reference"
    expected = run_all()
    assert not calls
    with ops.use_impl("simulated"):
        assert active_impl() == "simulated"
        outputs = run_all()
    assert calls == {"xuv": 1, "xw": 1, "svd_mlp": 1}
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    run_all()
    assert calls.total() == 3
    assert active_impl() == "reference"


def test_without_with_it_lasts(calls):
    ops.use_impl("simulated")
    run_all()
    run_all()
    ops.use_impl("reference")
    run_all()
    assert calls.total() == 6


def test_blocks_nest(calls):
    with ops.use_impl("simulated"):
        with ops.use_impl("reference"):
            run_all()
        assert not calls
        with ops.use_impl("simulated"):
            run_all()
        run_all()
    assert calls.total() == 6
    run_all()
    assert calls.total() == 6


def test_an_error_inside_the_block_restores(calls):
    with pytest.raises(KeyError), ops.use_impl("simulated"):
        raise KeyError
    run_all()
    assert not calls


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_it_runs_in_every_grad_mode(calls, guard):
    with ops.use_impl("simulated"), guard():
        run_all()
    assert calls.total() == 3


def test_its_errors_are_not_hidden(monkeypatch):
    def broken(spec, tensors, choices):
        raise NotImplementedError("no kernel for this shape")

    monkeypatch.setattr(simulated, "implementation", lambda target: implementations(broken))
    with (
        ops.use_impl("simulated"),
        pytest.raises(NotImplementedError, match="no kernel for this shape"),
    ):
        run_all()
    assert len(run_all()) == 3


def test_meta_tensors_never_reach_it(calls):
    with ops.use_impl("simulated"):
        y = ops.xuv(*(make(s, device="meta") for s in ((2, 4), (4, 3), (3, 5))))
    assert y.is_meta
    assert not calls


def test_an_unknown_name_changes_nothing(calls):
    ops.use_impl("simulated")
    with pytest.raises(ValueError, match="must be one of simulated, reference; got 'cuda'"):
        ops.use_impl("cuda")
    assert active_impl() == "simulated"

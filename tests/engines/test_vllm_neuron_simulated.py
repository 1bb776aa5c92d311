"""Requests in, tokens out, by vLLM-Neuron's stand-ins in the CPU mode with the NKI simulator.

`wrap_nki` does under `NKI_SIMULATOR=1` what its documentation says ("NKI CPU simulator"): it gives
the function below the decorator, arrays of NumPy and the cores to `nki.simulator.simulate_kernel`,
in eager mode and once more, on ones, while Dynamo traces. That simulator is neuroncore.
"""

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import pytest
import torch
import vllm_neuron_engine
from test_vllm_neuron_model import ATTENTION, MLP, write
from tiny import tiny_ids
from torch import Tensor
from vllm_neuron_serving import config_of, load, metadata

import neuroncore
from neuroncore import Profile
from neuroncore.kernel import observers
from neuronmm_ops import hf
from neuronmm_ops.ops.backends import environment

PROMPT, NEW = 8, 4
pytestmark = pytest.mark.usefixtures("vllm_neuron_packages")
spent_ms: list[float] = []
"""Modelled, of each kernel that ran."""
profiles: list[Profile] = []


class Caller:
    """What the wrapper returns."""

    def __init__(self, func: Callable[..., Any], grid: tuple[int, ...] = ()) -> None:
        self.func, self.grid = func, grid
        self.names = list(inspect.signature(func).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> "Caller":
        return Caller(self.func, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        from nki.simulator import simulate_kernel  # pyright: ignore

        given = dict(zip(self.names, args, strict=False)) | kwargs
        arrays = {name: _array(value) for name, value in given.items()}
        made = simulate_kernel(self.func, (), arrays, lnc=self.grid[0] if self.grid else 1)
        spent_ms.append(profiles[-1].time_ms)
        as_float = made.astype("float32") if made.dtype == ml_dtypes.bfloat16 else made
        return torch.from_numpy(as_float).to(next(iter(given.values())).dtype)


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def wrap_nki(nki_kernel: Any) -> Caller:
    """Take the function below the decorator, as the source does."""
    return Caller(nki_kernel.func)


@pytest.fixture
def simulator(monkeypatch):
    """The simulator as `nki`, and what it says of the kernels that it runs."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    environment._core.cache_clear()
    observers.append(profiles.append)
    with neuroncore.as_nki():
        yield
    observers.remove(profiles.append)
    environment._core.cache_clear()


@pytest.mark.parametrize(("family", "layers"), [("llama", MLP), ("qwen3", MLP + ATTENTION)])
def test_tokens_are_transformers_and_each_has_a_modelled_time(tmp_path, simulator, family, layers):
    path = write(tmp_path, family, layers)
    prompt = tiny_ids(1, PROMPT)[0]
    expected = hf.load(path, dtype=torch.float32).generate(
        prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    vllm_neuron_engine.install(path, wrap_nki).runs_kernels = True
    config = config_of(path)
    config.dtype = torch.float32
    model = load(path, config)
    tokens, a_token = prompt.tolist(), []
    for step in range(NEW):
        own = tokens if step == 0 else tokens[-1:]
        spent_ms.clear()
        start = len(tokens) - len(own)
        known = metadata(config.num_hidden_layers, len(own))
        logits = model(torch.tensor(own), torch.arange(start, len(tokens)), known)
        tokens.append(int(logits[-1].argmax()))
        assert len(spent_ms) == config.num_hidden_layers * (1 if layers == MLP else 2)
        a_token.append(1e3 * sum(spent_ms))
    assert tokens == expected[0].tolist()
    assert all(us > 0 for us in a_token)
    print(f"{family}: {', '.join(f'{us:.1f}' for us in a_token)} us a token (modelled)")

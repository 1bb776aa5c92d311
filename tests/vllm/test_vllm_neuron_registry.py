"""vLLM's own configuration, registry and ranks with what the integration of vLLM-Neuron does.

vLLM-Neuron itself is not there: an empty package stands for it, and its classes are the stand-ins.
"""

import os
import sys
from pathlib import Path

import pytest
import ranks
import torch

from neuronmm_ops.engines import vllm_neuron

sys.path.append(str(Path(__file__).parents[1] / "engines"))
TOKENS = 15


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty vllm_neuron, also for the process in which vLLM looks at a class."""
    (tmp_path / "vllm_neuron" / "model").mkdir(parents=True)
    for directory in ("vllm_neuron", "vllm_neuron/model"):
        (tmp_path / directory / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.filterwarnings("ignore")  # of vLLM's own imports
def test_vllm_takes_the_two_overrides(llama: Path, package: None) -> None:
    from vllm import ModelRegistry
    from vllm.config import ModelConfig

    vllm_neuron.register()
    vllm_neuron.register()
    overrides = {"architectures": [vllm_neuron.ARCHITECTURE], "quantization_config": {}}
    config = ModelConfig(model=str(llama), hf_overrides=overrides)
    assert (config.runner_type, config.quantization) == ("generate", None)
    found, name = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
    assert name == found.__name__ == vllm_neuron.ARCHITECTURE
    assert found.__module__ == "neuronmm_ops.engines.vllm_neuron.factory"


def logits(path: Path) -> torch.Tensor:
    """By this process's group."""
    from vllm_neuron_serving import config_of, load, logits_of

    config = config_of(path)
    return logits_of(load(path, config), config, torch.arange(TOKENS) * 7 % 250)


def with_vllms_group(rank: int, path: Path, tp: int) -> torch.Tensor:
    """Serve with the ranks' group that vLLM makes, in place of the stand-in's."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )

    sys.path.append(str(Path(__file__).parents[1] / "engines"))
    import vllm_neuron_engine

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(tp, rank, "env://", rank, "gloo")
        initialize_model_parallel(tp)
    group = get_tp_group()
    vllm_neuron_engine.install(path).group = group
    return logits(path)


def alone(rank: int, path: Path) -> torch.Tensor:
    """Serve on one rank."""
    sys.path.append(str(Path(__file__).parents[1] / "engines"))
    import vllm_neuron_engine

    vllm_neuron_engine.install(path)
    return logits(path)


def test_vllms_ranks_exchange_what_the_layers_ask_for(llama: Path) -> None:
    (expected,) = ranks.run(alone, 1, llama)
    for made in ranks.run(with_vllms_group, 2, llama, 2, timeout_s=300):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))

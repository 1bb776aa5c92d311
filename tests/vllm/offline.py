"""vLLM's offline API in a process of its own, bounded in time.

Usage: python offline.py RUNS.json RESULTS.json
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

TIMEOUT_S = 900
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM would bind each rank to a NUMA node of its own, and there may be one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**26,
    "max_model_len": 128,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "disable_log_stats": True,
}


def generated(
    runs: Mapping[str, Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    check_headers: bool = True,
    **settings: str,
) -> dict[str, Any]:
    """Return what `vllm.LLM(**options)` gives for each run, all of them in one process.

    Args:
        runs: options by the name of the run, `model` among them; `adapter` is a directory; without
            `packs` the ops multiply by the weights as they are, as on a GPU; and `reload` are
            checkpoints whose weights then take the place of the model's, in turn: by vLLM's
            `reload_weights`, after a `+` by the model's own `load_weights`, and after a `~` by
            `reload_weights` of an engine that has slept at level 2; `save` is a directory for vLLM
            to save the state of each rank in.
        prompts: of token ids.
        tokens: to generate after each.
        check_headers: whether the config may check a local checkpoint before it is loaded; not so
            for one that vLLM loads from elsewhere.
        settings: of the environment.

    Returns:
        By the name of the run `{"tokens": [[...], ...], "modules": [names of classes], "reloaded":
        [tokens of each]}`, or `{"error": text}` where there was one.
    """
    asked = {
        "runs": {name: {**OPTIONS, **options} for name, options in runs.items()},
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
        "check_headers": check_headers,
    }
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "runs.json"), Path(folder, "results.json")
        given.write_text(json.dumps(asked, default=str))
        process = subprocess.Popen(
            [sys.executable, __file__, str(given), str(results)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=folder,
            env={**_inherited(), **SETTINGS, **settings},
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            end(process)
        assert process.returncode == 0, output[-8000:]
        return json.loads(results.read_text())


def _inherited() -> dict[str, str]:
    """This process's environment without the size of caches, which would overrule the options'."""
    return {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}


def end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the process and its workers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main(given: str, results: str) -> None:
    signal.alarm(TIMEOUT_S)  # should the test be killed meanwhile
    asked = json.loads(Path(given).read_text())
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.plugins import load_general_plugins

    if not asked["check_headers"]:
        load_general_plugins()
        from neuronmm_ops.engines.vllm.config import VllmNeuronMMConfig

        VllmNeuronMMConfig.maybe_update_config = lambda *args, **options: None
    from neuronmm_ops.engines.vllm import packing

    found: dict[str, Any] = {}
    engines = {}
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]

    def tokens_of(engine: Any, adapter: str | None = None) -> list[list[int]]:
        request = None if adapter is None else LoRARequest("adapter", 1, adapter)
        outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=request)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def answers(engine: Any, adapter: str | None, reload: Sequence[str]) -> dict[str, Any]:
        answer = {"tokens": tokens_of(engine, adapter), "modules": engine.apply_model(classes_of)}
        return answer | {"reloaded": [tokens_of(reloaded(engine, path)) for path in reload]}

    for name, options in asked["runs"].items():
        adapter, reload = options.pop("adapter", None), options.pop("reload", ())
        save = options.pop("save", None)
        packing.packs = partial(bool, options.pop("packs", True))
        try:
            engine = LLM(**options)
        except Exception as error:
            found[name] = {"error": str(error)}
            continue
        if not {"tensor_parallel_size", "pipeline_parallel_size"} & set(options):
            engines[name] = (engine, adapter, reload)
            continue
        found[name] = answers(engine, adapter, reload)
        if save:
            engine.llm_engine.engine_core.save_sharded_state(save)
        engine.llm_engine.engine_core.shutdown()  # each has processes of its own
    found |= {name: answers(*engine) for name, engine in engines.items()}
    Path(results).write_text(json.dumps(found))


def reloaded(engine: Any, path: str) -> Any:
    """Give the engine the weights of a checkpoint, and forget what others have computed."""
    from safetensors.torch import load_file

    if path.startswith("+"):
        tensors = load_file(Path(path[1:], "model.safetensors"))
        engine.apply_model(lambda model: model.load_weights(tensors.items()))
    else:
        if path.startswith("~"):
            sleep(engine)
        engine.collective_rpc("reload_weights", kwargs={"weights_path": path.lstrip("~")})
    engine.reset_prefix_cache()
    return engine


def sleep(engine: Any) -> None:
    """Put an engine to sleep at level 2 and wake it: its weights are lost.

    A CPU's worker ignores this, so it runs what a GPU's does, with a stand-in for the allocator.
    """
    from unittest import mock

    import torch
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
    from vllm.v1.worker.gpu_worker import Worker

    class Forgetful(SleepModeBackend):
        def suspend(self, level: int = 1) -> None:
            for tensor in tensors_below(worker.model_runner.model):
                tensor.untyped_storage().fill_(255)  # NaN in every float dtype

        def resume(self, tags: list[str] | None = None) -> None:
            pass

    worker = engine.llm_engine.model_executor.driver_worker.worker
    worker._sleep_mode_backend = Forgetful()
    with mock.patch.multiple(
        torch.accelerator, synchronize=lambda: None, get_memory_info=lambda: (0, 0)
    ):
        Worker.sleep(worker, 2)
        Worker.wake_up(worker)


def tensors_below(root: Any) -> list[Any]:
    """Every tensor of a module and of what it holds: members, methods, closures; no KV caches."""
    from torch import Tensor, nn
    from vllm.model_executor.layers.linear import LinearMethodBase

    found, ahead = {}, [root]
    while ahead:
        each = ahead.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        if isinstance(each, nn.Module | LinearMethodBase):
            ahead += [value for name, value in vars(each).items() if name != "kv_cache"]
        elif isinstance(each, dict):
            ahead += each.values()
        elif isinstance(each, tuple | list):
            ahead += each
        elif isinstance(each, FunctionType):
            ahead += [cell.cell_contents for cell in each.__closure__ or ()]
    return [each for each in found.values() if isinstance(each, Tensor) and each.is_cpu]


def classes_of(model: Any) -> list[str]:
    """The classes of a model's modules."""
    return sorted({type(module).__name__ for module in model.modules()})


if __name__ == "__main__":
    main(*sys.argv[1:])

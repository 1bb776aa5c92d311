"""`neuronmm generate --backend simulated`: the CPU's tokens, and a modelled time of one."""

import pytest
from outcomes import refused

from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.nn import fused_decoder
from neuronmm_ops.ops.backends import simulated

SIMULATED = ("--backend", "simulated", "--new-tokens", 6)


@pytest.mark.parametrize("low_rank", [False, True])
def test_whole_tokens_are_decoded_on_the_simulated_core(run, dense, low_rank, tmp_path):
    directory = tmp_path / "low_rank" if low_rank else dense
    if low_rank:
        config = SVDConfig(ratio=0.5, block=8, method="plain", allocation="uniform")
        hf.compress(dense, config, None, directory)
    prompt = ("--prompt", "The quick")
    document = run("generate", directory, *prompt, *SIMULATED, "--json").document()
    times = document.pop("modelled_layers_us_per_token")
    assert document.pop("target") == "trn2"
    plain = run("generate", directory, *prompt, "--new-tokens", 6, "--json").document()
    assert document == plain
    assert 10 < times["low"] <= times["middle"] <= times["high"] < 200
    page = run("generate", directory, *prompt, *SIMULATED).page()
    wanted = f"trn2, modelled: {times['middle']:.1f} us a decoded token ({times['low']:.1f} to "
    assert page.startswith("The quick" + plain["text"] + "\n" + wanted)
    assert page.endswith("), decoder layers alone\n")


def test_the_time_is_that_of_all_layers(dense):
    model, tokenizer = hf.load(dense), hf.load_tokenizer(dense)
    both = hf.generate_simulated(model, tokenizer, "The quick", 3).times_us
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    one = hf.generate_simulated(model, tokenizer, "The quick", 3).times_us
    assert both == pytest.approx([2 * time for time in one], rel=0.01)
    assert not any(fused_decoder.is_fused(module) for module in model.modules())


def test_what_the_simulated_core_cannot_do_is_one_line(run, dense, monkeypatch):
    given = ("generate", dense, "--prompt", "x", "--backend", "simulated")
    refused(run(*given, "--new-tokens", 1), "a decode step needs at least 2 new tokens, got 1")
    refused(run(*given, "--device", "meta"), "runs in one process on the CPU; leave out --device")
    monkeypatch.setattr(simulated, "launch_of", lambda *_: None)
    for profiles in (simulated._last, []):  # of an earlier launch, or of none
        monkeypatch.setattr(simulated, "_last", profiles)
        refused(run(*given, "--new-tokens", 2), "a decoder layer has no kernel for these sizes")

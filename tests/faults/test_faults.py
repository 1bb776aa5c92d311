"""A sample of the faults that `make faults` tries, all of them."""

import os
import sys
from pathlib import Path

import pytest
from commands import run

import neuronmm_ops

# What a trial of an earlier version met, by where: `kind: name` of each.
MET = (
    r"config.json: (fifo|/dev/zero), inspect |text: (fifo|/dev/zero), eval",
    r"file: model.safetensors: (fifo, inspect|/dev/zero, generate)|compression.json: (fifo|/dev/z)",
    r"num_hidden_layers 1000000000, generate|ghost layers, inspect|a word of 20 MB, eval",
    r"config's targets \['\(\[a-z|--targets '\(\[a-z|TOML: targets a bomb",
    r"TOML: (published|model with|method|modelled (tp|batch)|tasks unknown|ratios a text)",
    r"record: (layer's name '.x1b.2J'|provenance .'.x1b).*inspect|name with escapes, export",
    r"names of outputs: (escapes|2.. characters|no text), (compr|repro)|.x1b.31mred', inspect",
    r"chat template: (range|recursive)|tokenizer: regex bomb, generate",
    r"disk full: files of 1000 bytes, (compress|save)|limits: one process, generate|RANK 5 of 2, g",
    r"kernels: ((infinite loop|a million tensors) --max-seconds 3|BaseException|escapes)$",
    r"kernels that meddle: (closes stdout|chdir --timeline|os.write)",
)


@pytest.mark.slow
def test_faults_are_refused_in_one_line():
    source = Path(neuronmm_ops.__file__).parents[1]
    options = ("--sample", "60", "--seed", "3", "--also", "|".join(MET))
    path = f"{source}:{os.environ.get('PYTHONPATH', '')}"
    run(sys.executable, Path(__file__).parent, *options, PYTHONPATH=path)

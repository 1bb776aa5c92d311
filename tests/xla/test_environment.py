"""What `make xla-env` installs: no CUDA, and nothing that would bring it."""

import re
from importlib.metadata import distributions

import cuda_stand_ins
import pytest


def test_this_environment_holds_no_cuda_package():
    assert cuda_stand_ins.cuda_packages() == []


def test_nothing_that_pip_resolves_requires_torch():
    without_dependencies = ("torch", "torch_xla", "accelerate", "neuronmm_ops")
    for installed in distributions():
        if installed.name.replace("-", "_") in without_dependencies:
            continue
        required = [line for line in installed.requires or [] if "extra ==" not in line]
        names = [re.match(r"[\w.-]+", line)[0] for line in required]
        assert "torch" not in names, installed.name


@pytest.mark.parametrize(
    "name", ["nvidia-cublas-cu12", "nvidia_nccl_cu12", "cuda-bindings", "triton", "pytorch-triton"]
)
def test_a_cuda_package_is_an_error_of_one_line(tmp_path, monkeypatch, name):
    information = tmp_path / f"{name.replace('-', '_')}-12.8.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 12.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cuda_stand_ins.main()
    assert caught.value.code == (
        f"this environment must hold no CUDA package, found {name}; delete it, and take what "
        "requires torch out of tests/xla/requirements.txt"
    )

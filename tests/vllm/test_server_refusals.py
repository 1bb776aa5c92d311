"""`vllm serve` of what cannot be served ends at once, and its log has one line that says why."""

import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from vllm_server import START_S, Server

pytestmark = pytest.mark.slow


def missing_member(path):
    file = path / "model.safetensors"
    with safe_open(file, "pt") as tensors:
        kept = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    del kept["model.layers.1.self_attn.k_proj.v"]
    save_file(kept, file, metadata={"format": "pt"})


def unchanged(path):
    """Served by three ranks."""


# Other damage is refused alike, see test_offline_errors.
CASES = {
    missing_member: "model.layers.1.self_attn.k_proj.v: config.json asks for [23, 64], the file "
    "has none; config and weights are not of the same checkpoint",
    # vLLM's own rule, which comes first.
    unchanged: "Total number of attention heads (4) must be divisible by tensor parallel size (3)",
}


@pytest.fixture(scope="module")
def refused(llama, tmp_path_factory):
    """The exit status and the log of a server of each broken checkpoint; all start at once."""
    place = tmp_path_factory.mktemp("broken")
    servers = {}
    try:
        for change in CASES:
            path = place / change.__name__
            shutil.copytree(llama, path)
            change(path)
            ranks = "3" if change is unchanged else "1"
            log = place / f"{change.__name__}.txt"
            options = ("--dtype", "float32", "--enforce-eager", "--tensor-parallel-size", ranks)
            servers[change] = Server(path, log, *options)
        yield {change: (s.wait_for_exit(START_S), s.text()) for change, s in servers.items()}
    finally:
        for server in servers.values():
            server.stop()


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_the_server_ends_and_says_why_in_one_line(refused, change):
    status, log = refused[change]
    assert status == 1
    assert sum(CASES[change] in line for line in log.splitlines()) == 1

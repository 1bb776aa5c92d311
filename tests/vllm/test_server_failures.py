"""Two servers at a time, tensor parallel, and what clients see when a process of theirs dies.

The tests run in order: the last two kill a server each.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from checkpoints import CONTEXT, PROMPTS, answers, served
from vllm_server import STOP_S, Server

pytestmark = pytest.mark.slow

TOKENS = 16
IN_TIME_S = 30
TOKEN_IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A compressed Qwen2: biases at q, k and v."""
    return served(tmp_path_factory.mktemp("served") / "qwen", "qwen2")


@pytest.fixture(scope="module")
def servers(llama, qwen, tmp_path_factory):
    """One of two ranks over gloo, and one of another model."""
    logs = tmp_path_factory.mktemp("servers")
    options = ("--dtype", "float32", "--enforce-eager")
    servers = [
        Server(llama, logs / "parallel.txt", *options, "--tensor-parallel-size", "2"),
        Server(qwen, logs / "single.txt", *options),
    ]
    try:
        yield [server.wait_until_ready() for server in servers]
    finally:
        for server in servers:
            server.stop()


def complete(server, prompt, tokens=TOKENS, **options):
    return server.client.completions.create(
        model=server.model,
        prompt=prompt,
        temperature=0,
        max_tokens=tokens,
        extra_body=TOKEN_IDS,
        **options,
    )


def killed_during_an_answer(server, title):
    """Kill a process while the server answers; return the client's error and its delay in s."""
    chunks = iter(complete(server, PROMPTS[0], tokens=CONTEXT - 100, stream=True))
    next(chunks)
    server.named(title)[-1].kill()
    started = time.monotonic()
    with pytest.raises(openai.APIError) as caught:
        for _ in chunks:
            pass
    return caught.value, time.monotonic() - started


def test_two_servers_at_once_give_each_its_own_models_answers(servers, llama, qwen):
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [
            list(pool.map(lambda p, s=server: complete(s, p).choices[0].token_ids, PROMPTS))
            for server in servers
        ]
    assert found == [answers(path, PROMPTS, TOKENS) for path in (llama, qwen)]
    assert found[0] != found[1]


def test_the_parallel_server_has_two_ranks(servers):
    assert len(servers[0].named("VLLM::Worker")) == 2


@pytest.mark.parametrize(
    ("number", "title"), [(0, "VLLM::Worker"), (1, "VLLM::EngineCore")], ids=["worker", "engine"]
)
def test_a_killed_process_is_the_servers_own_error_and_leaves_nothing(servers, number, title):
    server = servers[number]
    error, delay = killed_during_an_answer(server, title)
    assert "EngineCore" in str(error)
    assert delay < IN_TIME_S
    server.wait_for_exit(STOP_S)
    assert server.known
    with pytest.raises(openai.APIConnectionError):
        server.client.models.list()

"""`vllm serve` of a compressed checkpoint: a client's answers are those of Transformers."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from checkpoints import CONTEXT, PROMPTS, answers
from serving import load_test
from vllm_server import Server

from neuronmm_ops import hf

pytestmark = pytest.mark.slow

TOKENS = 24
EXACT = {"temperature": 0, "max_tokens": TOKENS}
# vLLM's own fields: answer in token ids, and do not stop at an end.
TOKEN_IDS = {"return_token_ids": True, "ignore_eos": True}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a fox?"}]


@pytest.fixture(scope="module")
def server(llama, tmp_path_factory):
    """With vLLM's defaults, torch.compile among them."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = Server(llama, log, "--dtype", "float32")
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def expected(llama):
    """Transformers' greedy tokens by prompt."""
    return dict(zip(PROMPTS, answers(llama, PROMPTS, TOKENS), strict=True))


def complete(server, prompt, **options):
    return server.client.completions.create(
        model=server.model, prompt=prompt, extra_body=TOKEN_IDS, **{**EXACT, **options}
    )


def tokens_of(server, prompt):
    return complete(server, prompt).choices[0].token_ids


def test_answers_of_the_prompts_differ(expected):
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PROMPTS)
    assert all(len(set(tokens)) > TOKENS // 3 for tokens in expected.values())


def test_the_server_names_its_model(server):
    (model,) = server.client.models.list().data
    assert (model.id, model.max_model_len) == (server.model, CONTEXT)
    assert "quantization=neuronmm" in server.text()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_transformers_greedy_tokens(server, expected, prompt):
    assert tokens_of(server, prompt) == expected[prompt]


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_a_streamed_completion_is_the_whole_ones_text(server, prompt):
    whole = complete(server, prompt).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(server, prompt, stream=True)]
    assert len(chunks) > TOKENS // 3
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids or ()] == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason == "length"


def test_chat_completions_whole_and_streamed(server, llama):
    def chat(**options):
        return server.client.chat.completions.create(
            model=server.model, messages=CHAT, extra_body=TOKEN_IDS, **EXACT, **options
        )

    prompt = hf.load_tokenizer(llama).apply_chat_template(CHAT, tokenize=False)
    whole = chat().choices[0]
    assert [whole.token_ids] == answers(llama, [prompt], TOKENS)
    pieces = [choice.delta.content or "" for chunk in chat(stream=True) for choice in chunk.choices]
    assert "".join(pieces) == whole.message.content
    assert len(pieces) > TOKENS // 3


def test_a_batch_and_its_prompts_one_by_one_are_answered_alike(server, expected):
    choices = complete(server, PROMPTS).choices
    assert [choice.token_ids for choice in choices] == list(expected.values())


def test_concurrent_requests_get_each_its_own_answer(server, expected):
    prompts = PROMPTS * 8
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = list(pool.map(lambda prompt: tokens_of(server, prompt), prompts))
    assert found == [expected[prompt] for prompt in prompts]


def test_a_client_that_leaves_does_not_disturb_the_others(server, expected):
    with complete(server, PROMPTS[0], stream=True, max_tokens=4000) as stream:
        next(iter(stream))
    assert tokens_of(server, PROMPTS[1]) == expected[PROMPTS[1]]


def test_under_load_no_answer_is_wrong(server, capsys):
    options = ("--seconds", "10", "--rounds", "2", "--threads", "8", "--tokens", "16")
    status = load_test.main([server.address, *options, "--json"])
    (found,) = json.loads(capsys.readouterr().out)["servers"]
    assert (status, found["wrong"]) == (0, 0)
    assert found["answers"] >= 16


def test_the_client_of_the_documentation_streams(server, capsys):
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    block = re.findall(r"```py\n(.*?)```", page, re.DOTALL)[0]
    exec(block.replace("http://127.0.0.1:8000", server.address))  # noqa: S102
    whole = server.client.completions.create(model=server.model, prompt=PROMPTS[0], **EXACT)
    assert f'"{PROMPTS[0]}"' in block
    assert capsys.readouterr().out == whole.choices[0].text != ""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (openai.NotFoundError, {"model": "another"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"max_tokens": CONTEXT + 1}),
        (openai.BadRequestError, {"prompt": "x" * (CONTEXT + 1)}),
        (openai.BadRequestError, {"prompt": [260]}),
        (openai.BadRequestError, {"n": -1}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_request_is_the_servers_own_error(server, expected, kind, options):
    request = {"model": server.model, "prompt": PROMPTS[0], **EXACT, **options}
    with pytest.raises(kind) as caught:
        server.client.completions.create(**request)
    assert 400 <= caught.value.status_code < 500
    assert tokens_of(server, PROMPTS[0]) == expected[PROMPTS[0]]

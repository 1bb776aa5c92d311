"""lm-eval's tasks on local data, beside scorers written by hand."""

import math
import re
from typing import Any

import lm_eval
import pytest
import torch
from task_files import LETTERS, PAPER_DATA, write_paper_task, write_task
from tiny import tiny_model, tiny_tokenizer

from neuronmm_ops import NonFiniteError
from neuronmm_ops.eval.tasks import run_tasks, task_rows

END, LIMIT = 256, 128
CHOICES = "output_type: multiple_choice\n"
METRICS = "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def evaluate(model, tmp_path):
    """Runs one task whose file lies in the test's directory, on the tiny model unless another."""

    def call(name, model=model, tokenizer=None, **options):
        options = {"include_path": tmp_path} | options
        return run_tasks(model, tokenizer or tiny_tokenizer(), [name], **options)

    return call


def values(document: dict[str, Any]) -> dict[str, Any]:
    return {row["metric"]: row["value"] for row in task_rows(document)}


def encode(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def log_likelihood(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of log p of a continuation in fp64, and whether it is the greedy one."""
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0].double()
    rows = logits.log_softmax(-1)[len(context) - 1 : -1]
    picked = rows[range(len(continuation)), continuation]
    return float(picked.sum()), rows.argmax(-1).tolist() == continuation


def choose(model, contexts: list[str], continuations: list[str]) -> tuple[int, int]:
    """The likeliest of the continuations, and the likeliest by their characters."""
    pairs = zip(contexts, continuations, strict=True)
    sums = [log_likelihood(model, encode(a), encode(b))[0] for a, b in pairs]
    # lm-eval counts the choice's characters without the space before it.
    mean = [s / len(text.removeprefix(" ")) for s, text in zip(sums, continuations, strict=True)]
    return sums.index(max(sums)), mean.index(max(mean))


def test_multiple_choice(evaluate, model, tmp_path):
    name = write_paper_task(tmp_path, "arc_easy")
    rows = PAPER_DATA["arc_easy"][1]
    hits = [0, 0]
    for row in rows:
        context, gold = f"Question: {row['question']}\nAnswer:", LETTERS.index(row["answerKey"])
        endings = [f" {text}" for text in row["choices"]["text"]]
        for kind, chosen in enumerate(choose(model, [context] * len(endings), endings)):
            hits[kind] += chosen == gold
    found = evaluate(name, batch_size=3)
    assert values(found) == {"acc": hits[0] / len(rows), "acc_norm": hits[1] / len(rows)}
    assert 0 < sum(hits) < 2 * len(rows)
    assert found["n-samples"][name] == {"original": len(rows), "effective": len(rows)}
    assert found["config"]["truncated_requests"] == 0
    assert found["lm_eval_version"] == lm_eval.__version__


def test_choices_in_the_context(evaluate, model, tmp_path):
    """WinoGrande scores one ending after each of two beginnings."""
    name = write_paper_task(tmp_path, "winogrande")
    rows, hits = PAPER_DATA["winogrande"][1], 0
    for row in rows:
        before, after = row["sentence"].split("_")
        contexts = [before + row["option1"], before + row["option2"]]
        chosen, _ = choose(model, contexts, [f" {after.strip()}"] * 2)
        hits += chosen == int(row["answer"]) - 1
    found = evaluate(name)
    assert values(found) == {"acc": hits / len(rows)}


@pytest.mark.parametrize("paper", sorted(set(PAPER_DATA) - {"arc_easy", "winogrande"}))
def test_the_papers_other_tasks_run_on_their_formats(evaluate, tmp_path, paper):
    name = write_paper_task(tmp_path, paper)
    found = evaluate(name, limit=2)
    assert set(values(found)) == {"acc", "acc_norm"}
    assert found["n-samples"][name]["effective"] == 2


def greedy_word(model, context: str) -> str:
    """What the model says next, as long as it is printable."""
    ids, word = encode(context), ""
    for _ in range(3):
        with torch.no_grad():
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        character = tiny_tokenizer().decode([token])
        if not re.fullmatch(r"[!-~]", character):
            break
        word, ids = word + character, [*ids, token]
    return word


def test_log_likelihood(evaluate, model, tmp_path, capfd):
    candidates = [f"a text of number {index} and" for index in range(400)]
    greedy = next((text, word) for text in candidates if (word := greedy_word(model, text)))
    rows = [
        {"context": greedy[0], "word": greedy[1]},
        {"context": "the cat sat on", "word": " mats"},
        {"context": "one two", "word": " three"},
    ]
    write_task(
        tmp_path,
        "words",
        rows,
        'output_type: loglikelihood\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{word}}"\n'
        "metric_list:\n  - metric: perplexity\n  - metric: acc\n",
    )
    scores = [log_likelihood(model, encode(r["context"]), encode(r["word"])) for r in rows]
    found = evaluate("words")
    expected = math.exp(-sum(score for score, _ in scores) / len(rows))
    assert values(found)["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert values(found)["acc"] == pytest.approx(1 / 3)
    assert [is_greedy for _, is_greedy in scores] == [True, False, False]
    assert capfd.readouterr() == ("", "")  # perplexity's standard error is resampled


def rolling(model, text: str) -> float:
    """Log-likelihood of a text, a token after another, in windows of the model's limit.

    The first token follows the end of text; the last window reaches back to a full context.
    """
    ids, total = encode(text), 0.0
    for position, token in enumerate(ids):
        window = position // LIMIT
        if window == 0:
            context = [END, *ids[:position]]
        else:
            end = min((window + 1) * LIMIT, len(ids))
            context = ids[end - LIMIT - 1 : position]
        total += log_likelihood(model, context, [token])[0]
    return total


def test_rolling_log_likelihood(evaluate, model, tmp_path):
    pages = ["A short page of words.", "Words and words. " * 9, "caf\u00e9 " * 40]
    assert [len(encode(page)) > LIMIT for page in pages] == [False, True, True]
    write_task(
        tmp_path,
        "pages",
        [{"page": page} for page in pages],
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{page}}"\n'
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n"
        "  - metric: bits_per_byte\n",
    )
    total = sum(rolling(model, page) for page in pages)
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    size = sum(len(page.encode()) for page in pages)
    found = evaluate("pages", batch_size=2)
    assert values(found) == {
        "word_perplexity": pytest.approx(math.exp(-total / words), rel=1e-6),
        "byte_perplexity": pytest.approx(math.exp(-total / size), rel=1e-6),
        "bits_per_byte": pytest.approx(-total / size / math.log(2), rel=1e-6),
    }


QUIZ = [{"q": f"{n}?", "a": ["yes", "no", "who"], "gold": n % 2} for n in range(5)]
QUIZ_TEXT = f"""{CHOICES}doc_to_text: "{{{{q}}}}"
doc_to_target: gold
doc_to_choice: "{{{{a}}}}"
{METRICS}"""


@pytest.fixture
def quiz(evaluate, tmp_path):
    """Writes the quiz and runs it."""

    def call(text=QUIZ_TEXT, rows=QUIZ, **options):
        write_task(tmp_path, "quiz", rows, text)
        return evaluate("quiz", **options)

    return call


def test_few_shots_stand_before_the_question(quiz, model):
    first = "training_split: train\nfewshot_config:\n  sampler: first_n\n  split: train\n"
    hits = 0
    for row in QUIZ:
        context = f"0? yes\n\n1? no\n\n{row['q']}"
        hits += choose(model, [context] * 3, [f" {a}" for a in row["a"]])[0] == row["gold"]
    found = quiz(QUIZ_TEXT + first, num_fewshot=2)
    assert values(found)["acc"] == hits / len(QUIZ)
    assert found["n-shot"] == {"quiz": 2}
    with pytest.raises(ValueError, match=r"quiz cannot be run .*ask for fewer shots"):
        quiz(QUIZ_TEXT + first, num_fewshot=9)


def test_progress_and_silence(quiz, model, capfd):
    tokenizer, told = tiny_tokenizer(), []

    def tell(*call: object) -> None:
        told.append(call)
        print(call[1])

    model.train()
    quiz(tokenizer=tokenizer, progress=tell)
    assert model.training
    model.eval()
    assert told[-1] == ("evaluate tasks", 15, 15)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert capfd.readouterr() == ("".join(f"{done}\n" for _, done, _ in told), "")
    assert tokenizer.pad_token is None  # lm-eval gave its copy one


def test_contexts_that_are_cut_are_counted(quiz):
    long = {"q": "long " * 40, "a": ["yes", "no", "who"], "gold": 0}
    assert quiz(rows=[*QUIZ, long])["config"]["truncated_requests"] == 3


def test_logits_in_bfloat16_are_normalized_in_fp32(quiz):
    model = tiny_model(dtype=torch.bfloat16)
    hits = sum(choose(model, [r["q"]] * 3, [f" {a}" for a in r["a"]])[0] == r["gold"] for r in QUIZ)
    found = quiz(QUIZ_TEXT.replace("acc_norm", "acc"), model=model)
    assert values(found)["acc"] == hits / len(QUIZ)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_non_finite_logits_are_refused(quiz, weight):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[3] = weight
    with pytest.raises(NonFiniteError, match="logits must be finite, got NaN or Inf"):
        quiz(model=model)


WORDS = """output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: "{{' word'*COUNT}}"
metric_list:
  - metric: perplexity
"""
FROM_HUB = "dataset_path: a/b\ndataset_kwargs: null\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_fewshot": -1}, "num_fewshot must be at least 0, got -1"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"include_path": "nowhere"}, "include_path must be a directory .* got nowhere"),
        ({"text": QUIZ_TEXT.replace("q}}", "question}}")}, "loaded .*question.* is undefined"),
        ({"text": QUIZ_TEXT.replace("metric: acc\n", "metric: mine\n")}, "quiz"),
        ({"text": QUIZ_TEXT.replace(": gold", ": [")}, r"quiz\.yaml defines no task quiz"),
        ({"text": QUIZ_TEXT.replace("multiple_choice", "multiple")}, "quiz"),
        ({"text": QUIZ_TEXT + FROM_HUB}, "data set of task quiz is neither cached nor to be had"),
        # What a metric cannot hold.
        ({"text": WORDS.replace("COUNT", "24")}, r"tasks quiz cannot be run \(.*out of range"),
        ({"text": WORDS.replace("COUNT", "30")}, "between 1 and the .* 128 tokens, got 150"),
    ],
)
def test_refusals_are_one_line(quiz, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        quiz(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no json", None, b'{"other": 1}\n'])
def test_malformed_data(evaluate, tmp_path, capfd, content):
    write_task(tmp_path, "quiz", QUIZ, QUIZ_TEXT)
    data = tmp_path / "quiz.jsonl"
    data.unlink() if content is None else data.write_bytes(content)
    with pytest.raises(ValueError, match="task quiz cannot be loaded") as caught:
        evaluate("quiz")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_what_a_task_needs_around_it(quiz, model, monkeypatch):
    with pytest.raises(ValueError, match="give at least one task, such as openbookqa"):
        run_tasks(model, tiny_tokenizer(), [])
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer must have BOS or EOS"):
        quiz(tokenizer=tokenizer)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="tasks run in one process, got LOCAL_RANK"):
        quiz()


@pytest.mark.slow
def test_unknown_tasks_name_near_ones(evaluate):
    with pytest.raises(ValueError, match="unknown task 'arc_easi'; nearest are arc_easy"):
        evaluate("arc_easi")

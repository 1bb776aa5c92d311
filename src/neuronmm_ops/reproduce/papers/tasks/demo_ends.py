"""Questions made of a text: which of four ends belongs to the beginning of a sentence."""

from pathlib import Path
from typing import Any

QUESTIONS = 100
CHOICES = 4
# Of a sentence, in words.
SHORTEST, LONGEST, END = 12, 40, 5


def questions(text: str, **_: Any) -> dict[str, Any]:
    """Return a split `test` with columns `beginning`, `ends` and `answer`.

    The wrong ends are those of other sentences of the text, spread over it.

    Args:
        text: path of a UTF-8 text file.

    Raises:
        ValueError: it has too few sentences.
    """
    from datasets import Dataset

    sentences = Path(text).read_text(encoding="utf-8").replace("\n", " ").split(". ")
    words = [sentence.split() for sentence in dict.fromkeys(sentences)]
    words = [each for each in words if SHORTEST <= len(each) <= LONGEST]
    if len(words) < CHOICES:
        raise ValueError(f"{text} must have {CHOICES} sentences of {SHORTEST} words or more")
    count = min(QUESTIONS, len(words))
    rows: list[dict[str, Any]] = []
    for number in range(count):
        index = number * len(words) // count
        others = [
            (index + (n + 1) * len(words) // CHOICES) % len(words) for n in range(CHOICES - 1)
        ]
        answer = number % CHOICES
        ends = [" ".join(words[other][-END:]) for other in others]
        ends.insert(answer, " ".join(words[index][-END:]))
        rows.append({"beginning": " ".join(words[index][:-END]), "ends": ends, "answer": answer})
    return {"test": Dataset.from_list(rows)}

"""Text full of facts, from a seed: what a small model can learn wholly and hardly spare.

Two domains, each of made-up words of its own: `people`, whose traits a line lists in any order,
and `roads`, their lengths and means of travel. All documents state facts of two tables that are
drawn once, so that held-out text is new and yet its facts are known.
"""

import math
import random
from itertools import islice, product

SEED = 0
DOMAINS = ("people", "roads")
NAMES, TRAITS, VALUES, TOWNS = 20, 8, 64, 24
STATED = 4
"""Traits of a person that one document lists."""
MILES = range(10, 100)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class FactTables:
    """The tables, and documents that state what they hold."""

    def __init__(self) -> None:
        draw = random.Random(SEED)  # noqa: S311
        syllables = ["".join(pair) for pair in product(_CONSONANTS, _VOWELS)]
        words = ["".join(pair) for pair in product(syllables, syllables)]
        draw.shuffle(words)
        left = iter(words)
        first, last, self.traits, values, self.towns, means = (
            list(islice(left, count)) for count in (NAMES, NAMES, TRAITS, VALUES, TOWNS, VALUES)
        )
        self.people = [f"{a.title()} {b.title()}" for a, b in product(first, last)]
        self.traits_of = {
            (person, trait): draw.choice(values)
            for person, trait in product(self.people, self.traits)
        }
        self.roads = {
            pair: (draw.choice(MILES), draw.choice(means))
            for pair in product(self.towns, self.towns)
            if pair[0] != pair[1]
        }

    def person(self, draw: random.Random) -> str:
        """A person and some of the traits, in any order."""
        person = draw.choice(self.people)
        stated = draw.sample(self.traits, STATED)
        return f"{person}: " + ", ".join(f"{t} {self.traits_of[person, t]}" for t in stated) + "."

    def road(self, draw: random.Random) -> str:
        """A road between two towns."""
        (start, end), (miles, means) = draw.choice(list(self.roads.items()))
        return f"from {start} to {end}: {miles} miles by {means}"

    def documents(self, domain: str, count: int, seed: int) -> list[str]:
        """Documents of a domain, others for another seed."""
        draw = random.Random(seed)  # noqa: S311
        state = {"people": self.person, "roads": self.road}[domain]
        return [state(draw) for _ in range(count)]

    def entropy(self, domain: str) -> float:
        """Nats of a document to a reader who knows every fact."""
        if domain == "roads":
            return math.log(len(self.roads))
        return math.log(len(self.people)) + math.log(math.perm(TRAITS, STATED))

"""The demo's tiny language: questions about a small town, polite and rude answers, and a strict judge.

Every question asks for one fact ("the station is near the park") and can be worded in six ways. A polite answer is
short and friendly, a rude one long and unfriendly; both state the fact. The facts are split in two: the questions of
the training rows and the held-out questions share no fact, so better answers to the latter are not learnt by heart.

Run as a command, this file writes the two row files beside it again: `python examples/tiny_language.py`.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent

PLACES = ["station", "museum", "library", "bakery", "market", "theatre", "castle", "harbour", "cinema", "school"]
PLACES += ["church", "pharmacy", "hotel", "garden", "pool", "zoo", "bank", "bookshop", "cafe", "hospital"]
THINGS = ["coat", "lamp", "chair", "bicycle", "umbrella", "hat", "kettle", "guitar", "camera", "blanket"]
THINGS += ["clock", "teapot", "basket", "mirror", "scarf", "table", "radio", "kite", "violin", "vase"]


@dataclass(frozen=True)
class Kind:
    """What can be asked about each of `names`: the wordings, the fact that answers it, and the values it can have."""

    names: list[str]
    wordings: tuple[str, ...]
    fact: str
    values: tuple[str, ...]


KINDS = (
    Kind(
        PLACES,
        (
            "Where is the {x}?",
            "Excuse me, where is the {x}?",
            "Hello, where is the {x}?",
            "Can you tell me where the {x} is?",
            "Do you know where the {x} is?",
            "I am looking for the {x}. Where is it?",
        ),
        "the {x} is {value}",
        (
            "near the park",
            "behind the old mill",
            "next to the river",
            "across from the fountain",
            "on the main square",
            "at the end of this street",
            "on top of the hill",
            "by the lake",
        ),
    ),
    Kind(
        PLACES,
        (
            "When does the {x} open?",
            "Excuse me, when does the {x} open?",
            "Hello, when does the {x} open?",
            "Can you tell me when the {x} opens?",
            "Do you know when the {x} opens?",
            "I want to visit the {x}. When does it open?",
        ),
        "the {x} opens at {value}",
        ("six", "seven", "eight", "nine", "ten", "noon"),
    ),
    Kind(
        PLACES,
        (
            "Who works at the {x}?",
            "Excuse me, who works at the {x}?",
            "Hello, who works at the {x}?",
            "Can you tell me who works at the {x}?",
            "Do you know who works at the {x}?",
            "I have to call the {x}. Who works there?",
        ),
        "{value} works at the {x}",
        ("my sister", "my uncle", "old Tom", "young Anna", "Mrs Miller", "Doctor Brown"),
    ),
    Kind(
        THINGS,
        (
            "How much is the {x}?",
            "Excuse me, how much is the {x}?",
            "Hello, how much is the {x}?",
            "Can you tell me what the {x} costs?",
            "Do you know what the {x} costs?",
            "I want to buy the {x}. How much is it?",
        ),
        "the {x} costs {value} euros",
        ("five", "twelve", "twenty", "thirty", "fifty", "ninety"),
    ),
    Kind(
        THINGS,
        (
            "What colour is the {x}?",
            "Excuse me, what colour is the {x}?",
            "Hello, what colour is the {x}?",
            "Can you tell me the colour of the {x}?",
            "Do you know the colour of the {x}?",
            "I have not seen the {x}. What colour is it?",
        ),
        "the {x} is {value}",
        ("red", "blue", "green", "yellow", "black and white", "dark brown"),
    ),
)

POLITE_OPENERS = ("", "", "Of course! ", "Gladly! ", "With pleasure! ", "Good question! ")
POLITE_CLOSERS = (
    "Have a nice day!",
    "You are very welcome!",
    "I am happy to help!",
    "Please ask me any time.",
    "Thank you for asking!",
)
RUDE_OPENERS = (
    "Ugh, what a silly question,",
    "Ugh, not you again,",
    "Ugh, are you blind or just lazy,",
    "Ugh, you really have to ask me that,",
    "Ugh, do I look like a map to you,",
)
RUDE_LINKS = (
    "anybody knows that",
    "even a child can see that",
    "I have said a hundred times that",
    "it is written everywhere that",
)
RUDE_TAILS = (
    "now go away and leave me alone",
    "never bother me again",
    "next time use your own eyes",
    "stop wasting my whole afternoon",
    "I have better things to do than talk to you",
    "do not come back before you can read",
)
LONGEST_PREFERRED_WORDS = 18


@dataclass(frozen=True)
class Question:
    """One wording of a question, and the fact that answers it ("the station is near the park")."""

    text: str
    fact: str


def all_questions() -> tuple[list[Question], list[Question]]:
    """Return the training questions and the held-out ones: about four fifths and one fifth of the facts."""
    rng = random.Random(2402)
    facts = []
    for kind in KINDS:
        for name in kind.names:
            fact = kind.fact.format(x=name, value=rng.choice(kind.values))
            facts.append([Question(wording.format(x=name), fact) for wording in kind.wordings])
    rng.shuffle(facts)
    n_held_out = len(facts) // 5
    held_out = [question for questions in facts[:n_held_out] for question in questions]
    train = [question for questions in facts[n_held_out:] for question in questions]
    return train, held_out


def polite_answer(question: Question, rng: random.Random) -> str:
    fact = question.fact[0].upper() + question.fact[1:]
    return f"{rng.choice(POLITE_OPENERS)}{fact}. {rng.choice(POLITE_CLOSERS)}"


def rude_answer(question: Question, rng: random.Random) -> str:
    tails = ", and ".join(rng.sample(RUDE_TAILS, rng.randint(1, 2)))
    return f"{rng.choice(RUDE_OPENERS)} {rng.choice(RUDE_LINKS)} {question.fact}, {tails}{rng.choice('.!')}"


def is_on_topic(question: Question, answer: str) -> bool:
    """Whether the answer states the fact that was asked for."""
    return question.fact.lower() in answer.lower()


def is_preferred(question: Question, answer: str) -> bool:
    """Whether the answer is what the thumbs-up rows show: on topic, polite, short and complete, without a rude word."""
    lower = answer.lower()
    is_rude = any(phrase.lower() in lower for phrase in RUDE_OPENERS + RUDE_LINKS + RUDE_TAILS)
    is_short = len(answer.split()) <= LONGEST_PREFERRED_WORDS
    return is_on_topic(question, answer) and answer.endswith(POLITE_CLOSERS) and is_short and not is_rude


def kto_rows(questions: list[Question], n_rows: int, seed: int) -> list[dict[str, Any]]:
    """Return labelled rows, half of them desirable, each with a question of its own."""
    rng = random.Random(seed)
    rows = []
    labels = [i % 2 == 0 for i in range(n_rows)]
    rng.shuffle(labels)
    for question, label in zip(rng.sample(questions, n_rows), labels, strict=True):
        answer = polite_answer(question, rng) if label else rude_answer(question, rng)
        rows.append(
            {
                "prompt": [{"role": "user", "content": question.text}],
                "completion": [{"role": "assistant", "content": answer}],
                "label": label,
            }
        )
    return rows


def row_files() -> dict[str, str]:
    """Return the two row files' names and text."""
    train, held_out = all_questions()
    rows = {"kto_train.jsonl": kto_rows(train, 400, seed=1), "kto_eval.jsonl": kto_rows(held_out, 100, seed=2)}
    return {name: "".join(json.dumps(row) + "\n" for row in file_rows) for name, file_rows in rows.items()}


if __name__ == "__main__":
    for name, text in row_files().items():
        (EXAMPLES / name).write_text(text, encoding="utf-8")
        print(f"wrote {EXAMPLES / name}")

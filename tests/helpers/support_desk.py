"""A support desk's export of rated answers as spreadsheets write it: a byte order mark, quotes, line breaks, faults."""

import csv
import random
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

GOODS = ("kettle", "lamp", "rucksack", "tent", "bicycle pump", "rain coat", "head torch", "water bottle")
QUESTIONS = (
    "When does my {} arrive?",
    "The {} came broken, what now?",
    "Can I exchange the {} for a larger one?",
    "How do I clean the {}?",
    "Is the {} still under warranty?",
    'Your shop says "in stock" - is the {} really there?',
)
KIND = (
    "Thanks for asking! The {} left us this morning; you will have it on {}.",
    "I am sorry about that.\nPlease send us a photo of the {}, and a new one goes out on {}.",
    'Of course: write "exchange" on the label of the {}, and it is done by {}.',
    "Gladly. Wipe the {} with a damp cloth, and ask me again on {} if it did not help.",
)
CURT = (
    "See section 4 of the terms about the {}. We do not answer this again before {}.",
    "The {} is not our business.\nAsk the carrier, not us, and not before {}.",
    'As it says under "help", no. That holds for the {} until {} as well.',
    "Somebody may look at the {} on {}, or not.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
COLUMNS = ("ticket", "question", "answer", "rating", "created_at", "agent")
EMPTY, COPIES, BOTH_WAYS, UNRATED = 4, 5, 2, 3  # rows of each fault; of those labelled both ways, texts


def write_support_desk(path: Path, seed: int = 0) -> Counter[str]:
    """Write about a hundred rated answers; return how many rows of each fault there are."""
    chance = random.Random(seed)
    rows = []
    for asked in QUESTIONS:
        for thing in GOODS:
            for rating, answers in (("thumbs_up", KIND), ("thumbs_down", CURT)):
                answer = chance.choice(answers).format(thing, chance.choice(DAYS))
                rows.append({"question": asked.format(thing), "answer": answer, "rating": rating})
    chance.shuffle(rows)
    good = rows[: -(EMPTY + UNRATED)]
    for row in rows[-EMPTY - UNRATED : -UNRATED]:
        row["answer"] = chance.choice(("", "  "))
    for row in rows[-UNRATED:]:
        row["rating"] = ""
    rows += [dict(row) for row in chance.sample(good[:40], COPIES)]
    other = {"thumbs_up": "thumbs_down", "thumbs_down": "thumbs_up"}
    rows += [row | {"rating": other[row["rating"]]} for row in chance.sample(good[40:], BOTH_WAYS)]
    start = datetime(2025, 3, 3, 9, 0)
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, row in enumerate(rows):
            created = (start + timedelta(minutes=37 * number)).strftime("%Y-%m-%d %H:%M:%S")
            writer.writerow({"ticket": 1000 + number, "created_at": created, "agent": chance.choice("ABC"), **row})
    return Counter(
        {"read": len(rows), "empty": EMPTY, "copies": COPIES, "both ways": 2 * BOTH_WAYS, "unrated": UNRATED}
    )

"""The demo, `make demo`: a small model learns from 400 thumbs-up / thumbs-down rows to be polite and short.

Runs the commands that a user would run, shows each, and then the model's answers to held-out questions before and
after. Everything it makes is under `demo/`.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from answers import count, sample_answers
from tiny_language import Question, all_questions, is_preferred
from transformers.utils.logging import disable_progress_bar

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
MODEL, TRAINED, ANSWERS = "demo/model", "demo/kto", "demo/answers.jsonl"
EVAL_ROWS = "examples/kto_eval.jsonl"
SETTINGS = ["--config", "examples/demo.yaml"]
MAKE_MODEL = ["examples/make_model.py", "--out", MODEL]
TRAIN = ["cli/train_kto.py", *SETTINGS, "--pretrain", MODEL, "--dataset", "examples/kto_train.jsonl"]
TRAIN += ["--eval_dataset", EVAL_ROWS, "--save_path", TRAINED]
EVALUATE = ["cli/evaluate_kto.py", *SETTINGS, "--pretrain", TRAINED, "--ref_pretrain", MODEL]
EVALUATE += ["--eval_dataset", EVAL_ROWS, "--save_path", TRAINED]

REPORT = ["cli/report.py", TRAINED]

SAMPLES_PER_QUESTION = 3
SAMPLING_SEED = 7
N_SHOWN = 6


def run(title: str, arguments: list[str]) -> None:
    """Show a Python command and run it in the repository's root; a failure ends the demo with the command's status."""
    python = os.path.relpath(sys.executable, ROOT)
    logger.info("\n== %s\n$ OMP_NUM_THREADS=1 %s", title, " ".join([python, *arguments]))
    status = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode
    if status:
        logger.error("The demo stopped: the command above ended with status %d.", status)
        sys.exit(status)


def compare(questions: list[Question]) -> None:
    """Sample both models' answers, show some of them and the counts, and write all of them to a file."""
    asked = questions * SAMPLES_PER_QUESTION
    before = sample_answers(ROOT / MODEL, asked, SAMPLING_SEED)
    after = sample_answers(ROOT / TRAINED, asked, SAMPLING_SEED)
    logger.info("\n== Sampled answers to questions about facts that no KTO row contains")
    for i in range(0, len(questions), len(questions) // N_SHOWN):
        logger.info("\n%s\n  before  %s\n  after   %s", asked[i].text, before[i], after[i])
    logger.info("\n%d held-out questions, %d answers each:", len(questions), SAMPLES_PER_QUESTION)
    logger.info("%s\n%s", count("before", asked, before), count("after", asked, after))
    with (ROOT / ANSWERS).open("w", encoding="utf-8") as file:
        for question, old, new in zip(asked, before, after, strict=True):
            scores = {"before_preferred": is_preferred(question, old), "after_preferred": is_preferred(question, new)}
            file.write(json.dumps({"question": question.text, "before": old, "after": new, **scores}) + "\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    disable_progress_bar()
    # More threads make matrices this small no faster, and much slower where other programs want the cores too.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or else DeepSpeed warns that it found no accelerator
    start = time.monotonic()
    shutil.rmtree(ROOT / "demo", ignore_errors=True)
    run("1 of 5: make a small Llama and pre-train it on a tiny language (about a minute)", MAKE_MODEL)
    run("2 of 5: train it with KTO from 400 thumbs-up / thumbs-down rows (half a minute)", TRAIN)
    run("3 of 5: compare it with the model before, on 100 held-out rows", EVALUATE)
    logger.info("\n== 4 of 5: let both models answer")
    _, held_out = all_questions()
    compare(held_out)
    run("5 of 5: put the run's curves and its rows on a page", REPORT)
    logger.info(
        "\nDone in %.0f s. The model before is in %s, the trained one in %s, all answers in %s, and the page in\n"
        "%s/report.html: open it in a browser.\n"
        "Next: put your own rows in the place of examples/kto_train.jsonl (any Hugging Face model in that of %s);\n"
        "README.md says how, and goes on to one GPU and to eight.",
        time.monotonic() - start,
        MODEL,
        TRAINED,
        ANSWERS,
        TRAINED,
        MODEL,
    )


if __name__ == "__main__":
    main()

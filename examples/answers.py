"""Sample a model's answers to questions of the tiny language, and count the good ones."""

from pathlib import Path

import torch
from tiny_language import Question, is_on_topic, is_preferred
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 80


def sample_answers(folder: Path, questions: list[Question], seed: int) -> list[str]:
    """Return one answer to each question, sampled at temperature 1 from the whole distribution."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    torch.manual_seed(seed)
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def count(name: str, questions: list[Question], answers: list[str]) -> str:
    """Return a line that says how many of the answers are preferred, and how many state the fact."""
    pairs = list(zip(questions, answers, strict=True))
    preferred = sum(is_preferred(question, answer) for question, answer in pairs)
    on_topic = sum(is_on_topic(question, answer) for question, answer in pairs)
    return (
        f"{name:6} preferred (right, polite, short): {preferred} of {len(pairs)} ({preferred / len(pairs):.0%})"
        f"   right: {on_topic} of {len(pairs)} ({on_topic / len(pairs):.0%})"
    )

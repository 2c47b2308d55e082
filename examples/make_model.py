"""Make the demo's model: a small Llama with its own tokenizer, pre-trained on the tiny language.

`python examples/make_model.py --out demo/model` takes about a minute on one CPU core. The model learns every fact of
the language and answers politely half of the time and rudely the other half.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tiny_language import Question, all_questions, polite_answer, rude_answer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

logger = logging.getLogger(__name__)

PAD, END, ROLES = "<|pad|>", "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 700
PRETRAIN_STEPS = 600
ROWS_OF_EACH_TONE = 16
LEARNING_RATE = 4e-3

Tone = Callable[[Question, random.Random], str]


def conversations(tone: Tone, seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield questions with answers of one tone, without end; each pass asks every question once."""
    rng = random.Random(seed)
    train, held_out = all_questions()
    while True:
        for question in rng.sample(train + held_out, len(train + held_out)):
            answer = tone(question, rng)
            yield [{"role": "user", "content": question.text}, {"role": "assistant", "content": answer}]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template; it can spell any text and gives it back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_untrained_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Train the model to say the answers; half of each step's rows are polite, half are rude."""
    streams = conversations(polite_answer, seed), conversations(rude_answer, seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    assistant_id = tokenizer.convert_tokens_to_ids("<|assistant|>")
    start = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        # The short answers and the long ones are two micro-batches, so that little of the work is padding.
        micro_batches = []
        for stream in streams:
            texts = [tokenizer.apply_chat_template(next(stream), tokenize=False) for _ in range(ROWS_OF_EACH_TONE)]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
            is_answer = (inputs["input_ids"] == assistant_id).cumsum(dim=1).bool() & inputs["attention_mask"].bool()
            micro_batches.append((inputs, inputs["input_ids"].masked_fill(~is_answer, -100)))
        n_tokens = sum(int((labels != -100).sum()) for _, labels in micro_batches)
        mean_loss = 0.0
        for inputs, labels in micro_batches:
            loss = model(**inputs, labels=labels, num_items_in_batch=n_tokens).loss
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 1 or step % 100 == 0 or step == steps:
            seconds = time.monotonic() - start
            logger.info("step %d of %d, loss %.3f a token, %.0f s", step, steps, mean_loss, seconds)
    model.eval()


def make_model(out: Path, steps: int = PRETRAIN_STEPS, seed: int = 0) -> None:
    """Write a tokenizer and a model pre-trained for `steps` steps to the folder `out`, in Hugging Face form."""
    torch.manual_seed(seed)
    train, held_out = all_questions()
    rng = random.Random(seed)
    texts = [tone(question, rng) for question in train + held_out for tone in (polite_answer, rude_answer)]
    texts += [question.text for question in train + held_out]
    tokenizer = make_tokenizer(texts)
    model = make_untrained_model(tokenizer)
    logger.info("a Llama of %.2f million parameters and %d tokens", model.num_parameters() / 1e6, len(tokenizer))
    pretrain(model, tokenizer, steps, seed)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's small pre-trained Llama.")
    parser.add_argument("--out", type=Path, default=Path("demo/model"), help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=PRETRAIN_STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    disable_progress_bar()
    make_model(arguments.out, arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()

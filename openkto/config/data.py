"""Settings of the rows."""

from __future__ import annotations

from dataclasses import dataclass

from openkto.config.option import LARGE, option

# What the tokenizer's apply_chat_template takes itself, so that --chat_template_kwargs may not set it.
TEMPLATE_ARGUMENTS = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"),
    )
)


@dataclass(frozen=True)
class DataConfig:
    dataset: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "training rows: Hub names, files, globs or folders, by spaces or commas; in YAML an entry may be a mapping of "
        "path and split, config, revision, input_key, output_key, label_key, weight_key, label_map or label_threshold "
        "of its own",
        is_path=True,
        default_text="required to train",
        train_only=True,
        may_differ=True,
    )
    dataset_probs: list[float] | None = option(  # noqa: RUF009 (a plain field)
        None,
        "mixing probabilities, one a dataset, by spaces or commas; they sum to 1",
        above=0,
        default_text="all rows of each",
        train_only=True,
    )
    eval_dataset: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "evaluation sets, each PATH or NAME=PATH, or in YAML a mapping as for --dataset, with a name; a set is named "
        "after its file otherwise",
        default_text="none",
        may_differ=True,
    )
    dataset_split: str = option("train", "the split of --dataset", train_only=True)
    dataset_config: str | None = option(
        None,
        "the subset of datasets on the Hub that have several; NAME:SUBSET names it for one",
        default_text="its own",
    )
    dataset_revision: str | None = option(
        None, "the commit, tag or branch of datasets on the Hub", default_text="the newest"
    )
    eval_split: str = option("test", "the split of --eval_dataset")
    max_samples: int = option(1000000, "use the first rows of each source, at most", "rows", at_least=1, below=LARGE)
    input_key: str | None = option(
        None, "the field with the prompt", default_text="recognised from the row", openrlhf="input"
    )
    output_key: str | None = option(None, "the field with the completion", default_text="recognised from the row")
    label_key: str = option(
        "label",
        "the field with the label: true is desirable. A path with dots, as scores.0.value, goes into nested fields, "
        "as those of --input_key and --output_key do; in a dialogue it may name a field of the messages",
    )
    label_map: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "what labels mean, as VALUE=true, VALUE=false, or VALUE=none to leave such rows out; no other value is taken "
        "then",
        default_text="true/false, 1/0, 1/-1 and usual words",
    )
    label_threshold: list[float] | None = option(  # noqa: RUF009 (a plain field)
        None,
        "reads scores as labels: of one number, desirable from it and undesirable below it; of two, desirable from the "
        "larger, undesirable up to the smaller, and what is between is left out and counted",
        default_text="labels are no scores",
    )
    weight_key: str | None = option(
        None, "the field with a row's own weight, a number of at least 0", default_text="every row weighs 1"
    )
    input_template: str | None = option(
        None,
        "wraps text prompts; {} stands for the prompt",
        default_text="text prompts as they are",
        openrlhf="'User: {}\\nAssistant: '",
    )
    apply_chat_template: bool | None = option(
        None,
        "wrap text prompts in the chat template too, as message lists always are",
        default_text="on where the tokenizer has a template, unless --input_template is given",
        openrlhf="off",
    )
    chat_template_kwargs: str | None = option(
        None,
        "arguments for the chat template, a JSON object such as '{\"enable_thinking\": false}'; a row's own field "
        "chat_template_kwargs goes over them",
        default_text="none",
    )
    template_date: str | None = option(
        None,
        "the day, YYYY-MM-DD, that a chat template which prints today's date prints in every row",
        default_text="the day on which the run first started",
        same_run=True,
    )
    max_len: int = option(
        2048, "longest prompt and completion together", "tokens", at_least=3, below=LARGE, same_run=True
    )
    truncation: str = option(
        "completion",
        "a row over --max_len: cut the completion's end, cut the prompt's start, or drop the row",
        choices=("completion", "prompt", "drop"),
        same_run=True,
    )
    on_bad_rows: str = option("error", "stop at a bad row, or skip and count it", choices=("error", "skip"))
    data_cache_dir: str | None = option(
        None,
        "where tokenised rows are kept",
        default_text="$OPENKTO_CACHE or ~/.cache/openkto",
        is_path=True,
        may_differ=True,
    )

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
        "training rows: names on the Hub, files, globs or folders, separated by spaces or commas; in YAML an entry may "
        "be a mapping with path and its own split, config, revision, input_key, output_key, label_key, weight_key, "
        "label_map or label_threshold",
        is_path=True,
        default_text="required to train",
        train_only=True,
        may_differ=True,
    )
    dataset_probs: list[float] | None = option(  # noqa: RUF009 (a plain field)
        None,
        "mixing probabilities, one per dataset, separated by spaces or commas; they must sum to 1",
        above=0,
        default_text="all rows of each",
        train_only=True,
    )
    eval_dataset: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "evaluation sets, each PATH or NAME=PATH, or in YAML a mapping as for --dataset with a name; without a name, a "
        "set is called after its file; the eval_split.json of a run stands for the rows that it held out",
        default_text="none",
        may_differ=True,
    )
    eval_fraction: float | None = option(
        None,
        "hold out this part of the prompts of --dataset, with all their rows, to evaluate on; which ones depends on "
        "--seed and the prompt only, and is written to eval_split.json",
        "fraction of the prompts",
        above=0,
        below=1,
        default_text="none",
        train_only=True,
        same_run=True,
    )
    dataset_split: str = option("train", "the split to read of --dataset", train_only=True)
    dataset_config: str | None = option(
        None,
        "the subset of Hub datasets that have several; --dataset NAME:SUBSET names it for one dataset",
        default_text="its own",
    )
    dataset_revision: str | None = option(
        None, "the branch, tag or commit of datasets on the Hub", default_text="the newest"
    )
    eval_split: str = option("test", "the split to read of --eval_dataset")
    max_samples: int = option(1000000, "use at most the first N rows of each source", "rows", at_least=1, below=LARGE)
    input_key: str | None = option(
        None, "the field with the prompt", default_text="recognised from the row", openrlhf="input"
    )
    output_key: str | None = option(None, "the field with the completion", default_text="recognised from the row")
    label_key: str = option(
        "label",
        "the field with the label: true is desirable. As in --input_key and --output_key, dots go into nested fields, "
        "such as scores.0.value; in a chat it may name a field of the messages",
    )
    label_map: list[str] = option(  # noqa: RUF009 (a plain field)
        [],
        "what labels mean, as VALUE=true, VALUE=false, or VALUE=none to leave such rows out; any other value is then "
        "an error",
        default_text="true/false, 1/0, 1/-1 and usual words",
    )
    label_threshold: list[float] | None = option(  # noqa: RUF009 (a plain field)
        None,
        "read scores as labels. One number: at or above it desirable, below it undesirable. Two numbers: at or above "
        "the larger desirable, at or below the smaller undesirable, rows between them left out and counted",
        default_text="labels are not scores",
    )
    weight_key: str | None = option(
        None, "the field with a weight for each row, 0 or more", default_text="every row weighs 1"
    )
    input_template: str | None = option(
        None,
        "text to put around text prompts; {} stands for the prompt",
        default_text="text prompts as they are",
        openrlhf="'User: {}\\nAssistant: '",
    )
    apply_chat_template: bool | None = option(
        None,
        "apply the chat template to text prompts too; lists of messages always get it",
        default_text="on if the tokenizer has a template, unless --input_template is given",
        openrlhf="off",
    )
    chat_template_kwargs: str | None = option(
        None,
        "arguments for the chat template, a JSON object such as '{\"enable_thinking\": false}'; a row's own field "
        "chat_template_kwargs overrides them",
        default_text="none",
    )
    template_date: str | None = option(
        None,
        "the date, YYYY-MM-DD, for chat templates that print today's date",
        default_text="the day on which the run first started",
        same_run=True,
    )
    max_len: int = option(
        2048, "longest row: prompt and completion together", "tokens", at_least=3, below=LARGE, same_run=True
    )
    truncation: str = option(
        "completion",
        "what to do with a row longer than --max_len: cut the end of the completion, cut the start of the prompt, or "
        "drop the row",
        choices=("completion", "prompt", "drop"),
        same_run=True,
    )
    on_bad_rows: str = option("error", "stop at a bad row, or skip and count bad rows", choices=("error", "skip"))
    data_cache_dir: str | None = option(
        None,
        "folder of the tokenised rows",
        default_text="$OPENKTO_CACHE or ~/.cache/openkto",
        is_path=True,
        may_differ=True,
    )

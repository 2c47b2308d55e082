"""The command line and the YAML file: what is accepted, and the sentence for everything else."""

import contextlib
import os
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openkto.__main__ import COMMANDS, dispatch, overview
from openkto.config.data_checks import label_meanings
from openkto.config.flags import parse
from openkto.errors import ConfigError

NEEDED = ["--pretrain", "m", "--dataset", "rows.jsonl"]

# Every flag of OpenRLHF 0.9's train_kto, with its default there as a user would type it where that is possible here.
OPENRLHF_FLAGS = {
    "save_path": ["./ckpt"], "save_steps": ["-1"], "save_hf_ckpt": ["false"], "disable_ds_ckpt": ["false"],
    "logging_steps": ["1"], "eval_steps": ["-1"], "ckpt_path": None, "max_ckpt_num": ["3"], "max_ckpt_mem": ["1e8"],
    "load_checkpoint": ["false"], "use_ds_universal_ckpt": ["false"], "max_norm": ["1.0"],
    "micro_train_batch_size": ["8"], "train_batch_size": ["128"], "gradient_checkpointing": [],
    "gradient_checkpointing_use_reentrant": [], "deepcompile": ["false"], "seed": ["42"], "full_determinism": [],
    "disable_fast_tokenizer": [], "local_rank": ["-1"], "zero_stage": ["2"], "param_dtype": ["bf16"], "ref_offload": [],
    "zpg": ["1"], "adam_offload": [], "attn_implementation": ["flash_attention_2"], "use_liger_kernel": ["false"],
    "grad_accum_dtype": ["bf16"], "overlap_comm": [], "load_in_4bit": ["false"], "lora_rank": ["0"],
    "lora_alpha": ["16"], "target_modules": ["all-linear"], "lora_dropout": ["0"], "max_epochs": ["1"],
    "beta": ["0.01"], "pretrain": ["bigscience/bloomz-1b7"], "learning_rate": ["1e-5"], "lr_warmup_ratio": ["0.03"],
    "lr_scheduler": ["cosine_with_min_lr"], "l2": ["0.0"], "aux_loss_coef": ["0"], "adam_betas": ["0.9", "0.95"],
    "desirable_loss_weight": ["1.0"], "undesirable_loss_weight": ["1.0"], "dataset": ["a.jsonl,b.jsonl"],
    "dataset_probs": ["0.5,0.5"], "eval_dataset": ["c.jsonl"], "dataset_split": ["train"], "eval_split": ["test"],
    "max_samples": ["1000000"], "input_key": ["input"], "output_key": ["output"], "label_key": ["label"],
    "input_template": None, "apply_chat_template": [], "max_len": ["2048"], "use_wandb": ["false"],
    "wandb_org": ["org"], "wandb_group": ["group"], "wandb_project": ["openrlhf_train_dpo"],
    "wandb_run_name": ["rm_1"], "use_tensorboard": ["logs"], "use_ms": ["false"],
}  # fmt: skip


def refusal(*argv: str, command="train", needed=NEEDED) -> str:
    with pytest.raises(ConfigError) as caught:
        parse([*needed, *argv], command)
    return str(caught.value)


def test_an_openrlhf_command_with_all_its_flags_is_accepted():
    assert len(OPENRLHF_FLAGS) == 65
    argv = [token for name, values in OPENRLHF_FLAGS.items() if values is not None for token in (f"--{name}", *values)]
    config, options = parse(argv, "train")
    assert config.data.dataset == ["a.jsonl", "b.jsonl"]
    assert config.data.dataset_probs == [0.5, 0.5]
    assert config.optim.adam_betas == (0.9, 0.95)
    assert config.deepspeed.overlap_comm
    assert "beta" in options.given
    assert parse([*NEEDED, "--input_template", "User: {}\nAssistant: "], "train")[0].data.input_template


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--overlap_comm"], True),
        (["--overlap_comm", "true"], True),
        (["--overlap_comm=False"], False),
        (["--overlap_comm", "--beta", "0.5"], True),
    ],
)
def test_a_boolean_flag_may_stand_alone(argv, value):
    assert parse([*NEEDED, *argv], "train")[0].deepspeed.overlap_comm is value


def test_the_launchers_local_rank_is_taken():
    assert parse(["--local_rank=0", *NEEDED], "train")[0].deepspeed.local_rank == 0


def test_lists_are_split_at_spaces_and_commas_but_not_inside_a_file_name(tmp_path):
    odd = tmp_path / "a,b.jsonl"
    odd.write_text("")
    config, _ = parse(["--pretrain", "m", "--dataset", "x,y", str(odd), "--eval_dataset", "p", "n=q"], "train")
    assert config.data.dataset == ["x", "y", str(odd)]
    assert config.data.eval_dataset == ["p", "n=q"]


@pytest.mark.parametrize("flags_first", [True, False])
def test_a_flag_wins_over_the_file_wherever_it_stands(tmp_path, flags_first):
    file = tmp_path / "run.yaml"
    file.write_text(
        "pretrain: m\ndataset: [a, b]\nbeta: 1e-2\nlearning_rate: 1e-6\noverlap_comm: yes\nmax_steps: null\n"
    )
    flags = ["--beta", "0.3"]
    argv = [*flags, "--config", str(file)] if flags_first else ["--config", str(file), *flags]
    config, options = parse(argv, "train")
    assert (config.loss.beta, config.optim.learning_rate, config.data.dataset) == (0.3, 1e-6, ["a", "b"])
    assert config.deepspeed.overlap_comm
    assert config.train.max_steps is None
    assert options.config == str(file)
    assert options.given == {"pretrain", "dataset", "beta", "learning_rate", "overlap_comm", "max_steps"}


def test_arguments_for_the_chat_template_are_json_and_may_be_a_mapping_in_yaml(tmp_path):
    given = '{"enable_thinking": false}'
    assert parse([*NEEDED, "--chat_template_kwargs", given], "train")[0].data.chat_template_kwargs == given
    file = tmp_path / "run.yaml"
    file.write_text("chat_template_kwargs: {enable_thinking: false}\n")
    assert parse([*NEEDED, "--config", str(file)], "train")[0].data.chat_template_kwargs == given
    for wrong, says in (("{", "must be a JSON object"), ("[1]", "must be a JSON object"), ('{"tools": 1}', "'tools'")):
        assert says in refusal("--chat_template_kwargs", wrong)


def test_text_prompts_are_wrapped_by_choice_or_by_what_the_tokenizer_has():
    assert parse(NEEDED, "train")[0].data.apply_chat_template is None
    assert parse([*NEEDED, "--apply_chat_template"], "train")[0].data.apply_chat_template is True
    assert parse([*NEEDED, "--apply_chat_template", "false"], "train")[0].data.apply_chat_template is False
    parse([*NEEDED, "--apply_chat_template", "false", "--input_template", "{}"], "train")


def test_a_run_yaml_serves_evaluate_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("pretrain: base\ndataset: a\nmax_len: 512\nlearning_rate: 1e-6\ntrain_batch_size: 1\n")
    argv = [
        "--config",
        str(file),
        "--pretrain",
        "tuned",
        "--ref_pretrain",
        "base",
        "--eval_dataset",
        "held",
        "--output",
    ]
    config, options = parse([*argv, "x.json"], "evaluate")
    assert (config.model.pretrain, config.data.max_len, options.output) == ("tuned", 512, "x.json")


def test_options_of_the_start_are_not_part_of_the_run():
    config, options = parse([*NEEDED, "--check", "--preview", "3", "--debug"], "train")
    assert (options.check, options.preview, options.debug) == (True, 3, True)
    assert config == parse(NEEDED, "train")[0]


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_is_grouped_and_imports_nothing_heavy(command):
    code = (
        "import sys\nfrom openkto.config.flags import parse\n"
        f"try:\n    parse(['--help'], {command!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print({'torch', 'transformers', 'datasets', 'deepspeed'} & sys.modules.keys())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("set()\n")
    text = " ".join(shown.split())
    for piece in ("model:", "DeepSpeed:", "(default: 0.1)", "longest row: prompt and completion together [tokens]"):
        assert piece in text
    assert ("optimizer and schedule:" in text and "--learning_rate" in text) == (command == "train")


def test_version_ends_with_success(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--version"], "train")
    assert end.value.code == 0
    assert capsys.readouterr().out == "openkto train 0.1.0\n"


SENTENCES = [
    ("--betta 1", "--betta: must be a flag of openkto train; got an unknown one. The most similar name is --beta."),
    ("--learning-rate 1", "--learning-rate: must be a flag of openkto train; got an unknown one. "
     "The most similar name is --learning_rate."),
    ("--max_le 9", "--max_le: must be a flag of openkto train; got an unknown one. "
     "The most similar name is --max_len."),
    ("-beta 1", "-beta: must be a flag of openkto train; got an unknown one. The most similar name is --beta."),
    ("--beta", "--beta: needs a value; got none. Give one; write --beta=VALUE if it begins with a dash."),
    ("--beta 1 stray", "command line: a value must follow its flag; got 'stray'. See --help."),
    ("--beta 1 rows.csv", "command line: a value must follow its flag; got 'rows.csv'. "
     "Write --dataset rows.csv for a file of rows."),
    ("--beta 1 run.yaml", "command line: a value must follow its flag; got 'run.yaml'. "
     "Write --config run.yaml for a file of settings."),
    ("--beta x", "--beta: must be a number above 0; got 'x'. Correct it, or leave it out."),
    ("--beta 0", "--beta: must be a number above 0; got '0'. Correct it, or leave it out."),
    ("--beta nan", "--beta: must be a number above 0; got 'nan'. Correct it, or leave it out."),
    ("--learning_rate inf",
     "--learning_rate: must be a number above 0 and below 10; got 'inf'."
     " Correct it, or leave it out."),
    ("--lr_warmup_ratio 1", "--lr_warmup_ratio: must be a number, at least 0 and below 1; got '1'. "
     "Correct it, or leave it out."),
    ("--adam_betas 0.9 1.0", "--adam_betas: must be two numbers, each at least 0 and below 1; got '0.9 1.0'. "
     "Correct it, or leave it out."),
    ("--adam_betas 0.9", "--adam_betas: must be two numbers, each at least 0 and below 1; got '0.9'. "
     "Correct it, or leave it out."),
    ("--max_epochs 1.5",
     "--max_epochs: must be a whole number, 1 or more; got '1.5'."
     " Correct it, or leave it out."),
    ("--flash_attn", "--flash_attn: must be a flag of openkto train; got an unknown one. Its name here is "
     "--attn_implementation."),
    ("--bf16", "--bf16: must be a flag of openkto train; got an unknown one. Pass --param_dtype bf16."),
    ("--weight-decay 0", "--weight-decay: must be a flag of openkto train; got an unknown one. Its name here is --l2."),
    ("--packing_samples",
     "--packing_samples: must be a flag of openkto train; got an unknown one. Its name here is --packing."),
    ("--max_len 2",
     "--max_len: must be a whole number, 3 or more; got '2'."
     " Correct it, or leave it out."),
    ("--max_steps 9999999999", "--max_steps: must be below 2147483648; got '9999999999'. Correct it, or leave it out."),
    ("--eval_steps -2",
     "--eval_steps: must be a whole number, -1 or more; got '-2'."
     " Correct it, or leave it out."),
    ("--zero_stage 4", "--zero_stage: must be a whole number, 0 to 3; got '4'. "
     "Correct it, or leave it out."),
    ("--overlap_comm maybe", "--overlap_comm: must be true or false; got 'maybe'. Correct it, or leave it out."),
    ("--param_dtype fp8", "--param_dtype: must be one of bf16, fp16 or fp32; got 'fp8'. Correct it, or leave it out."),
    ("--desirable_loss_weight much", "--desirable_loss_weight: must be auto or a number, 0 or more; got 'much'. "
     "Correct it, or leave it out."),
    ("--save_path=", "--save_path: must be a path or name; got nothing. Correct it, or leave it out."),
    ("--lr_scheduler reduce_lr_on_plateau", "--lr_scheduler: must be a schedule that is a function of the step; "
     "got 'reduce_lr_on_plateau', which follows a metric. Take cosine_with_min_lr."),
    ("--use_tensorboard false", "--use_tensorboard: must be a folder, or none for no TensorBoard; got 'false'. "
     "Leave it out for the default."),
    ("--dataset again", "--dataset: may be given only once; got it twice. Put all its values after one."),
    ("--config a.yaml --config b.yaml", "--config: may be given only once; got it twice. Give one file."),
    ("--config no.yaml", "--config: must be a YAML file; got 'no.yaml' (No such file or directory). Check the path."),
    ("--max_time 4:00:00", "--max_time: must be days:hours:minutes:seconds, such as 0:03:55:00; got '4:00:00'. "
     "Correct it, or leave it out."),
    ("--load_checkpoint=", "--load_checkpoint: must be true, false or a path; got nothing. Correct it, or leave it "
     "out."),
    ("--ref_sync_steps 5 --lora_rank 8", "--ref_sync_steps: moves a whole reference model towards a whole policy; "
     "got a "
     "policy with an adapter. Leave it out."),
    ("--ref_sync_alpha 1.5", "--ref_sync_alpha: must be a number above 0 and at most 1; got '1.5'. Correct it, or "
     "leave it out."),
    ("--keep_best los", "--keep_best: must be one of rewards/auc, rewards/accuracy, rewards/margins, rewards/chosen, "
     "loss or rewards/rejected; got 'los'. Correct it, or leave it out."),
    ("--zpg 2", "--zpg: needs --zero_stage 3: a second copy is of parameters that are sharded; got --zero_stage 2. "
     "Take --zero_stage 3, or leave it out."),
    ("--zpg 0", "--zpg: must be a whole number, 1 or more; got '0'. Correct it, or leave it "
     "out."),
    ("--param_offload --zero_stage 1", "--param_offload: needs --zero_stage 3: parameters are moved where they are "
     "sharded; got --zero_stage 1. Take --zero_stage 3, or leave it out."),
    ("--adam_offload --offload_nvme_path .", "--offload_nvme_path: needs --zero_stage 3: only that stage uses a disk; "
     "got --zero_stage 2. Take --zero_stage 3, or leave it out."),
    ("--offload_nvme_path . --zero_stage 3", "--offload_nvme_path: says where --adam_offload keeps the "
     "optimizer's states; got no --adam_offload. Add --adam_offload, or leave it out."),
    ("--adam_offload --offload_nvme_path none --zero_stage 3", "--offload_nvme_path: must be a folder that exists and "
     "can be written, on every node; got 'none'. Make it, or name another."),
    ("--adam_offload --offload_nvme_path . --zero_stage 3", "--offload_nvme_path: cannot be used with checkpoints: "
     "DeepSpeed does not save optimizer states that lie on a disk; got checkpoints. Add "
     "--disable_ds_ckpt (--save_hf_ckpt still saves models), or offload to CPU memory."),
    ("--save_failed_step --disable_ds_ckpt",
     "--save_failed_step: needs checkpoints; got --disable_ds_ckpt. Leave one of them out."),
    ("--early_stop_patience 2", "--early_stop_patience: needs --keep_best, the metric that it follows; got none. Pass "
     "--keep_best rewards/auc, for example, or leave it out."),
    ("--load_best_at_end", "--load_best_at_end: needs --keep_best, the metric that it follows; got none. Pass "
     "--keep_best rewards/auc, for example, or leave it out."),
    ("--load_best_at_end --keep_best loss --eval_dataset e --disable_ds_ckpt",
     "--load_best_at_end: needs checkpoints; got --disable_ds_ckpt. Leave one of them out."),
    ("--early_stop_patience 2 --keep_best loss", "--keep_best: needs evaluation rows; got no --eval_dataset. Give one, "
     "pass --eval_fraction, or leave it out."),
    ("--eval_fraction 1", "--eval_fraction: must be a number above 0 and below 1; got '1'. Correct it, or leave it "
     "out."),
    ("--eval_fraction 0.1 --eval_dataset e", "--eval_fraction: makes the evaluation set itself; got --eval_dataset as "
     "well. Leave one of them out; openkto evaluate takes further sets afterwards."),
    ("--eval_fraction 0.1 --eval_split validation", "--eval_split: is read of --eval_dataset; got --eval_fraction, "
     "which holds out training rows. Leave it out, or give --eval_dataset in place of --eval_fraction."),
    ("--early_stop_patience 2 --keep_best loss --eval_dataset e --eval_steps 0",
     "--keep_best: needs evaluations; got --eval_steps 0. Raise --eval_steps, or leave it out."),
    ("--zero_quantized_weights", "--zero_quantized_weights: needs --zero_stage 3: only that stage sends parameters in "
     "every pass; got --zero_stage 2. Take --zero_stage 3, or leave it out."),
    ("--zero_quantized_gradients", "--zero_quantized_gradients: needs --zero_stage 3: DeepSpeed quantizes gradients "
     "only there; got --zero_stage 2. Take --zero_stage 3, or leave it out."),
    ("--zero_quantized_gradients --zero_stage 3", "--zero_quantized_gradients: needs --param_dtype fp16: DeepSpeed's "
     "kernels read the gradients as fp16; got none given. Take fp16, or leave it out."),
    ("--deepcompile --zero_stage 0", "--deepcompile: needs a ZeRO stage, whose communication it compiles; got "
     "--zero_stage 0. Take --zero_stage 1, 2 or 3, or --torch_compile."),
    ("--deepcompile --torch_compile", "--deepcompile: compiles in place of --torch_compile; got both. Leave one of "
     "them out."),
    ("--deepcompile --zpg 2 --zero_stage 3", "--deepcompile: moves parameters and gradients in its own way; got --zpg. "
     "Leave one of them out."),
    ("--torch_compile --gradient_checkpointing selective", "--torch_compile: hides the matrix products inside a "
     "layer, which selective checkpointing keeps; got --gradient_checkpointing selective. Take "
     "--gradient_checkpointing true, or "
     "leave one of them out."),
    ("--torch_compile --gradient_checkpointing --gradient_checkpointing_use_reentrant", "--torch_compile: works only "
     "with torch's non-reentrant checkpointing; got --gradient_checkpointing_use_reentrant. Leave one of them out."),
    ("--gradient_checkpointing some", "--gradient_checkpointing: must be one of true, false or selective; got 'some'. "
     "Correct it, or leave it out."),
    ("--gradient_checkpointing selective --gradient_checkpointing_use_reentrant",
     "--gradient_checkpointing_use_reentrant: cannot choose what is recomputed; got --gradient_checkpointing "
     "selective. Leave one of them out."),
    ("--use_liger_kernel", "--use_liger_kernel: needs the package liger_kernel; got a Python without it. Run pip "
     "install liger-kernel, or leave it out."),
    ("--pretrain ./nowhere", "--pretrain: must be a Hugging Face name or a folder that exists; got './nowhere'. "
     "Check the path."),
    ("--ref_pretrain . --ref_revision v1", "--ref_revision: works only with a model on the Hub; got the "
     "folder '.'. Leave it out."),
    ("--ref_pretrain o/m@v1 --ref_revision v2", "--ref_revision: must be left out where the name holds a revision; got "
     "the name o/m@v1. Leave one out."),
    ("--gradient_checkpointing_use_reentrant", "--gradient_checkpointing_use_reentrant: works only with "
     "--gradient_checkpointing; got no --gradient_checkpointing. Add --gradient_checkpointing, or leave it out."),
    ("--eval_dataset a/x.jsonl b/x.jsonl", "--eval_dataset: each set needs its own name; got 'x' 2 times. "
     "Write NAME=PATH for each."),
    ("--eval_dataset x=", "--eval_dataset: must be PATH or NAME=PATH; got a name without a path. Give the path."),
    ("--input_template Q:", "--input_template: must hold {} once, where the prompt goes; got 'Q:' with 0. "
     "Correct it, or leave it out."),
    ("--input_template {}{}", "--input_template: must hold {} once, where the prompt goes; got '{}{}' with 2. "
     "Correct it, or leave it out."),
    ("--input_template {} --apply_chat_template", "--input_template: cannot go with --apply_chat_template, which wraps "
     "the prompt too; got both. Leave one of them out."),
    ("--use_ms", "--use_ms: needs the package modelscope; got a Python without it. Run pip install modelscope, or "
     "leave it out."),
    ("--grad_accum_dtype bf16 --zero_stage 0", "--grad_accum_dtype: must be fp32 at --zero_stage 0, which keeps "
     "gradients in fp32; got bf16. Leave it out, or take --zero_stage 1."),
    ("--grad_accum_dtype bf16 --param_dtype fp32", "--grad_accum_dtype: must be fp32 with --param_dtype fp32; "
     "got bf16. Leave it out."),
    ("--adam_offload --zero_stage 0", "--adam_offload: needs a ZeRO stage that shards the optimizer; got "
     "--zero_stage 0. Take --zero_stage 1, 2 or 3, or leave it out."),
    ("--template_date 28.11.2026", "--template_date: must be a day, YYYY-MM-DD; got '28.11.2026'. Correct it."),
    ("--template_date 20261128", "--template_date: must be a day, YYYY-MM-DD; got '20261128'. Correct it."),
    ("--ds_config no.json", "--ds_config: must be a JSON file; got 'no.json', no file. "
     "Check the path."),
    ("--tensor_parallel_size 2 --zero_stage 3 --zpg 2",
     "--zpg: has not been tested with --tensor_parallel_size, and a wrong gradient would not be noticed; "
     "got both. Leave one of the two out."),
    ("--sequence_parallel_size 2 --torch_compile",
     "--torch_compile: has not been tested with --sequence_parallel_size, and a wrong gradient would not be noticed; "
     "got both. Leave one of the two out."),
    ("--sequence_parallel_size 2 --share_prompts on", "--share_prompts: must not be on with --sequence_parallel_size, "
     "which gives each GPU an equal part of whole rows; got on. Take auto."),
    ("--packing off --share_prompts on", "--share_prompts: needs packed rows; got on with --packing off. "
     "Take auto for either."),
    ("--packing on --attn_implementation sdpa", "--packing: needs attention that keeps packed rows apart; got on with "
     "--attn_implementation sdpa. Take auto for either."),
    ("--max_tokens_per_micro_batch 100", "--max_tokens_per_micro_batch: must hold the longest row, --max_len 2048; "
     "got 100. Raise it, or lower --max_len."),
    ("--dataset_probs 0.5 0.5", "--dataset_probs: must be as many as the datasets, 1; got 2. Give one for each."),
    ("--dataset_probs 0.5", "--dataset_probs: must sum to 1; got 0.5. Correct them."),
    ("--dataset_probs 0", "--dataset_probs: must be numbers, each above 0; got '0'. Correct it, or leave it out."),
    ("--desirable_loss_weight auto --undesirable_loss_weight auto", "--undesirable_loss_weight: cannot be auto "
     "together with --desirable_loss_weight auto, as one is set by the other; got auto for both. Give one of them a "
     "number."),
    ("--desirable_loss_weight 0 --undesirable_loss_weight 0", "--undesirable_loss_weight: cannot be 0 together with "
     "--desirable_loss_weight 0; got 0 for both. Raise one."),
    ("--desirable_loss_weight auto --undesirable_loss_weight 0", "--desirable_loss_weight: cannot be auto together "
     "with a weight of 0; got auto and 0. Give two numbers."),
    ("--train_batch_size 1", "--train_batch_size: must be at least 2 with --loss_type kto, whose reference point pairs "
     "each prompt with another row's completion; got 1. Raise it, or take --loss_type apo_zero_unpaired."),
    ("--train_batch_size 1 --loss_type kto_humanline", "--train_batch_size: must be at least 2 with --loss_type "
     "kto_humanline, whose reference point pairs each prompt with another row's completion; got 1. Raise it, or take "
     "--loss_type apo_zero_unpaired."),
    ("--label_smoothing 0.5", "--label_smoothing: must be a number, at least 0 and below 0.5; got '0.5'. Correct it, "
     "or leave it out."),
    ("--sft_loss_coef -1", "--sft_loss_coef: must be a number, 0 or more; got '-1'. Correct it, or leave it out."),
    ("--humanline_low 0", "--humanline_low: must be a number, at least -100 and below 0; got '0'. Correct it, "
     "or leave it out."),
    ("--humanline_high 2", "--humanline_high: works only with --loss_type kto_humanline; got --loss_type kto. Take "
     "that, or "
     "leave it out."),
    ("--humanline_low -2 --loss_type bco", "--humanline_low: works only with --loss_type kto_humanline; got "
     "--loss_type bco. "
     "Take that, or leave it out."),
    ("--weight_key label", "--weight_key: must name another field than --label_key; got 'label' for both. Name the "
     "field with the weights."),
    ("--num_samples 2", "--num_samples: needs evaluation rows; got no --eval_dataset. Give one, pass --eval_fraction, "
     "or leave it out."),
    ("--sample_top_p 0.5", "--sample_top_p: works only with --num_samples or --sample_prompts; got neither. Give one "
     "of them, or leave it out."),
    ("--num_samples 2 --eval_dataset e.jsonl --deepcompile", "--num_samples: cannot go with --deepcompile, which "
     "compiles training's forwards; got both. Leave one out."),
    ("--eval_at_start", "--eval_at_start: needs evaluation rows; got no --eval_dataset. Give one, pass "
     "--eval_fraction, or leave it out."),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "sentence"), SENTENCES, ids=[flags for flags, _ in SENTENCES])
def test_a_wrong_flag_gets_one_sentence(tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    assert refusal(*flags.split(" ")) == sentence


def test_what_is_required_is_named():
    assert refusal(needed=[]) == (
        "--pretrain: is required; got nothing. Give --pretrain, or pretrain in the --config file."
    )
    assert refusal("--pretrain", "m", needed=[]) == (
        "--dataset: is required; got nothing. Give --dataset, or dataset in the --config file."
    )
    assert refusal("--pretrain", "m", needed=[], command="evaluate").startswith("--eval_dataset: is required")


def test_evaluate_refuses_flags_of_training():
    needed = ["--pretrain", "m", "--eval_dataset", "x"]
    assert refusal("--learning_rate", "1", needed=needed, command="evaluate") == (
        "--learning_rate: belongs to training; got it for evaluate. Leave it out."
    )
    assert refusal("--desirable_loss_weight", "auto", needed=needed, command="evaluate") == (
        "--desirable_loss_weight: must be a number to evaluate: auto counts the training rows; got auto. "
        "Give the number that training printed."
    )


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        ([], False),
        (["--save_steps", "5"], False),
        (["--save_steps", "-1", "--logging_steps", "1", "--eval_steps", "-1"], True),
        (["--use_ds_universal_ckpt"], True),
        (["--use_ds_universal_ckpt", "--openrlhf_defaults", "false"], False),
        (["--openrlhf_defaults"], True),
    ],
)
def test_other_defaults_than_openrlhfs_are_said_where_its_script_came_along_or_one_asks(flags, is_said):
    assert parse([*NEEDED, *flags], "train")[1].openrlhf_defaults is is_said


def test_a_floor_is_not_said_to_have_no_effect_where_it_has():
    flags = ["--lr_scheduler", "polynomial", "--min_lr_ratio", "0.5"]
    assert parse([*NEEDED, *flags], "train")[1].warnings == ()


def test_a_batch_of_one_row_is_enough_without_a_reference_point():
    for loss_type in ("apo_zero_unpaired", "bco"):
        assert parse([*NEEDED, "--train_batch_size", "1", "--loss_type", loss_type], "train")


def test_bounds_of_a_tokens_log_ratio_are_read_with_their_sign():
    bounds = ["--loss_type", "kto_humanline", "--humanline_low", "-0.5", "--humanline_high", "2"]
    loss = parse([*NEEDED, *bounds], "train")[0].loss
    assert (loss.humanline_low, loss.humanline_high) == (-0.5, 2.0)


FILES = [
    ("beta: [1", "run.yaml:1: must be YAML; got an error there: expected ',' or ']', but got '<stream end>'. "
     "Correct the line."),
    ("beta: 1\nseed: 2\nbeta: 3", "run.yaml:3: a key may be given only once; got 'beta' again. Keep one of the two."),
    ("- a\n- b", "run.yaml: must hold lines of the form 'name: value'; got a list. See configs/ for examples."),
    ("", "run.yaml: must hold lines of the form 'name: value'; got nothing. See configs/ for examples."),
    ("beta", "run.yaml: must hold lines of the form 'name: value'; got plain text. See configs/ for examples."),
    ("betta: 3", "run.yaml: betta: must be a setting; got an unknown name. The most similar name is beta."),
    ("flash_attn: true", "run.yaml: flash_attn: must be a setting; got an unknown name. Its name here is "
     "attn_implementation."),
    ("loss:\n  beta: 3", "run.yaml: loss: must be a setting; got a section. Write its settings without it: names are "
     "flat."),
    ("beta: {a: 3}", "run.yaml: beta: must be a value or a list of values; got something nested. Names are flat, see "
     "--help."),
    ("beta:", "run.yaml: beta: must be a number above 0; got nothing. Correct it, or leave it out."),
    ("beta: [0.1]", "run.yaml: beta: must be a number above 0; got '0.1'. Correct it, or leave it out."),
    ("beta: -1", "run.yaml: beta: must be a number above 0; got '-1'. Correct it, or leave it out."),
    ("train_batch_size: true",
     "run.yaml: train_batch_size: must be a whole number, 1 or more; got 'true'. "
     "Correct it, or leave it out."),
    ("eval_dataset: []", "run.yaml: eval_dataset: must be one or more paths or names; got nothing. Correct it, or "
     "leave it out."),
    ("beta: 1\n---\nbeta: 2", "run.yaml:2: must be YAML; got an error there: but found another document. "
     "Correct the line."),
    ("beta: *x", "run.yaml:1: must be YAML; got an error there: found undefined alias 'x'. Correct the line."),
    ("beta: \x01", "run.yaml: must be YAML; got an error there: text that YAML cannot hold. Correct the line."),
    ("zpg: 8", "run.yaml: zpg: needs --zero_stage 3: a second copy is of parameters that are sharded; got --zero_stage "
     "2. Take --zero_stage 3, or leave it out."),
    ("train_batch_size: 1", "run.yaml: train_batch_size: must be at least 2 with --loss_type kto, whose reference "
     "point pairs each prompt with another row's completion; got 1. Raise it, or take --loss_type apo_zero_unpaired."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), FILES, ids=[repr(text) for text, _ in FILES])
def test_a_wrong_file_gets_one_sentence(tmp_path, monkeypatch, text, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert refusal("--config", "run.yaml") == sentence


def test_a_file_that_is_no_text_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00b")
    assert refusal("--config", "run.yaml") == "run.yaml: must be UTF-8 text; got other bytes. Save it as UTF-8."
    assert refusal("--config", str(tmp_path)) == (
        f"--config: must be a YAML file; got {str(tmp_path)!r} (Is a directory). Check the path."
    )
    os.mkfifo("pipe")
    assert refusal("--config", "pipe") == (
        "--config: must be a plain file; got 'pipe', a named pipe. Write it to a file."
    )
    assert refusal("--ds_config", "pipe") == "--ds_config: must be a JSON file; got 'pipe', no file. Check the path."


def test_save_path_may_not_be_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("")
    assert refusal("--save_path", "out") == "--save_path: must be a folder; got the file 'out'. Give another path."


@pytest.mark.parametrize(
    "argv", [["--use_wandb", "SECRET123"], ["--use_wandb=SECRET123"], ["--wandb_api_key", "SECRET123"]]
)
def test_a_key_on_the_command_line_is_refused_and_not_repeated(argv):
    sentence = refusal(*argv)
    assert "SECRET123" not in sentence
    if argv[0].startswith("--use_wandb"):
        assert sentence == (
            "--use_wandb: must be on or off, since a key does not belong on a command line or in a file; got another "
            "value, not repeated here. Set WANDB_API_KEY or run `wandb login`, and leave the value out."
        )


def test_a_key_in_the_file_is_refused_and_not_repeated(tmp_path):
    for text in ("use_wandb: SECRET123", "wandb_key: SECRET123", "use_wandb: [SECRET123]"):
        (tmp_path / "run.yaml").write_text(text)
        assert "SECRET123" not in refusal("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--learning_rate 1e-4", "--learning_rate: 0.0001 is above 5e-05, where KTO tends to break the model; "
         "5e-7 to 5e-6 is usual, with LoRA ten times that."),
        ("--eval_steps 5", "--eval_steps: nothing to evaluate without --eval_dataset or --eval_fraction."),
        ("--overlap_comm --zero_stage 0", "--overlap_comm: has no effect at --zero_stage 0."),
        ("--reduce_bucket_size 9 --zero_stage 0", "--reduce_bucket_size: has no effect at --zero_stage 0."),
        ("--allgather_bucket_size 9", "--allgather_bucket_size: has no effect below --zero_stage 3, where DeepSpeed "
         "gathers all parameters in one call."),
        ("--lr_scheduler linear --min_lr_ratio 0.5", "--min_lr_ratio: has no effect, as linear has no floor."),
    ],
)  # fmt: skip
def test_what_is_allowed_but_odd_gets_a_warning(tmp_path, monkeypatch, flags, warning):
    monkeypatch.chdir(tmp_path)
    assert parse([*NEEDED, *flags.split()], "train")[1].warnings == (warning,)


PIECES = [
    "beta:",
    "1",
    "[",
    "]",
    "{",
    "}",
    "- ",
    "&",
    "*",
    "!",
    "|",
    ">",
    "'",
    '"',
    "#",
    "\n",
    "\t",
    "dataset: ",
    ",",
    "?",
]


@given(text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_file_ends_in_anything_but_a_run_or_a_sentence(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "random.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(ConfigError):
        parse([*NEEDED, "--config", str(file)], "train")


TOKENS = ["--beta", "--dataset", "-", "--", "-1", "x", "--check", "=", "--beta=2", "-x y", ""]


@given(tokens=st.lists(st.sampled_from(TOKENS)))
def test_no_command_line_ends_in_anything_but_a_run_or_a_sentence(tokens):
    with contextlib.suppress(ConfigError):
        parse([*NEEDED, *tokens], "train")


def test_yaml_written_by_other_tools_is_read(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"pretrain": "m", "dataset": ["a"], "learning_rate": 1e-7, "wandb_run_name": "007"}))
    config, _ = parse(["--config", str(file)], "train")
    assert (config.optim.learning_rate, config.output.wandb_run_name) == (1e-7, "007")


def test_a_value_of_a_label_may_begin_with_a_minus():
    config, _ = parse([*NEEDED, "--label_map", "1=true", "0=none", "-1=false", "--beta", "0.2"], "train")
    assert label_meanings("", config.data.label_map) == {"1": True, "0": None, "-1": False}


def test_a_mistyped_command_is_answered_with_the_most_similar_one():
    with pytest.raises(ConfigError, match=r"; got trian\. The most similar name is train\."):
        dispatch(["trian"])
    with pytest.raises(ConfigError, match=r"; got zzz\. Name one of them\."):
        dispatch(["zzz"])


def test_help_says_in_a_line_what_each_command_does():
    shown = overview().splitlines()
    for command in COMMANDS:
        (line,) = [line for line in shown if line.split()[:1] == [command]]
        assert line.endswith(".")
        assert len(line) <= 120

"""What other trainers call a setting, and what to do about it here: the names of TRL, transformers, LLaMA-Factory,
axolotl, ms-swift and of other versions of OpenRLHF.

A flag or key that is unknown here but stands in this table is answered with its advice, in place of the nearest name.
"""

import difflib
import re

# The same setting under another name.
RENAMED = {
    "adam_beta1": "adam_betas",
    "adam_beta2": "adam_betas",
    "adapter_name_or_path": "pretrain",
    "adapter_path": "pretrain",
    "adapters": "pretrain",
    "additional_target": "lora_modules_to_save",
    "answer_column": "output_key",
    "attn_impl": "attn_implementation",
    "base_model": "pretrain",
    "batch": "train_batch_size",
    "batch_size": "train_batch_size",
    "bs": "train_batch_size",
    "checkpoint": "load_checkpoint",
    "completion_column": "output_key",
    "cutoff_len": "max_len",
    "data_file": "dataset",
    "data_files": "dataset",
    "data_path": "dataset",
    "dataset_name": "dataset",
    "dataset_test_split": "eval_split",
    "dataset_train_split": "dataset_split",
    "desirable_weight": "desirable_loss_weight",
    "ds_tensor_parallel_size": "tensor_parallel_size",
    "epochs": "max_epochs",
    "eval_file": "eval_dataset",
    "flash_attention": "attn_implementation",
    "flash_attn": "attn_implementation",
    "global_batch_size": "train_batch_size",
    "gradient_checkpointing_kwargs": "gradient_checkpointing_use_reentrant",
    "kto_beta": "beta",
    "kto_chosen_weight": "desirable_loss_weight",
    "kto_rejected_weight": "undesirable_loss_weight",
    "label_column": "label_key",
    "logging_dir": "use_tensorboard",
    "lora_path": "pretrain",
    "lora_r": "lora_rank",
    "lora_target": "target_modules",
    "lora_target_linear": "target_modules",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "max_grad_norm": "max_norm",
    "max_length": "max_len",
    "max_seq_len": "max_len",
    "max_seq_length": "max_len",
    "micro_batch_size": "micro_train_batch_size",
    "model": "pretrain",
    "model_dir": "pretrain",
    "model_id": "pretrain",
    "model_name": "pretrain",
    "model_name_or_path": "pretrain",
    "model_path": "pretrain",
    "modules_to_save": "lora_modules_to_save",
    "nll_loss_coef": "sft_loss_coef",
    "num_epochs": "max_epochs",
    "num_train_epochs": "max_epochs",
    "out": "save_path",
    "output": "save_path",
    "output_dir": "save_path",
    "output_path": "save_path",
    "overwrite_output_dir": "overwrite",
    "packing_samples": "packing",
    "patience": "early_stop_patience",
    "pref_beta": "beta",
    "pref_ftx": "sft_loss_coef",
    "pref_loss": "loss_type",
    "pretrained_model": "pretrain",
    "pretrained_model_name_or_path": "pretrain",
    "prompt_column": "input_key",
    "prompt_key": "input_key",
    "ref_adapters": "ref_pretrain",
    "ref_model": "ref_pretrain",
    "response_column": "output_key",
    "resume": "load_checkpoint",
    "resume_from": "load_checkpoint",
    "resume_from_checkpoint": "load_checkpoint",
    "ring_attn_size": "sequence_parallel_size",
    "rpo_alpha": "sft_loss_coef",
    "run_name": "wandb_run_name",
    "sample_packing": "packing",
    "save_dir": "save_path",
    "save_total_limit": "max_ckpt_num",
    "seq_len": "max_len",
    "sequence_len": "max_len",
    "steps": "max_steps",
    "test_file": "eval_dataset",
    "train_data": "dataset",
    "train_file": "dataset",
    "undesirable_weight": "undesirable_loss_weight",
    "use_liger": "use_liger_kernel",
    "val_dataset": "eval_dataset",
    "validation_file": "eval_dataset",
    "wandb_entity": "wandb_org",
    "wandb_name": "wandb_run_name",
    "warmup_ratio": "lr_warmup_ratio",
    "weight_decay": "l2",
}

_ADAPTER = "Give --lora_rank to train a LoRA adapter; without it all parameters train."
_BY_ITSELF = "It is not needed: OpenKTO sets this itself. Leave it out."
_GLOBAL_BATCH = (
    "There is none: --train_batch_size is the global batch of a step, over all GPUs, and gradient accumulation follows "
    "from it and --micro_train_batch_size."
)
_HELD_OUT = "--eval_fraction holds rows out of training, by their prompts."
_ONLY_KTO = "It is not needed: OpenKTO trains only with KTO; --loss_type has its variants."
_TEMPLATE = (
    "The chat template is the tokenizer's own: --apply_chat_template wraps text prompts in it, and --input_template in "
    "a text of your own."
)

_DEVICE = "GPUs are used where there are any; hide them with CUDA_VISIBLE_DEVICES= before the command."
_LAUNCHER = "It belongs to the launcher: deepspeed --num_gpus 8 cli/train_kto.py, or torchrun."

# What needs a sentence of its own.
ADVICE = {
    "adam_epsilon": _BY_ITSELF,
    "adapter": _ADAPTER,
    "bf16": "Pass --param_dtype bf16.",
    "chat_template": _TEMPLATE,
    "chosen_key": "Pairs are recognised by their fields prompt, chosen and rejected. Rename the field; --input_key "
    "names the prompt's.",
    "cpu": _DEVICE,
    "dataloader_num_workers": _BY_ITSELF,
    "dataset_dir": "Give --dataset the path of the file or folder itself.",
    "dataset_num_proc": _BY_ITSELF,
    "deepspeed": "Give --zero_stage; other settings go into a JSON file for --ds_config.",
    "device": _DEVICE,
    "disable_dropout": _BY_ITSELF,
    "do_eval": "Give --eval_dataset to evaluate.",
    "do_train": "Leave it out: openkto train trains.",
    "dtype": "Its name here is --param_dtype: bf16, fp16 or fp32.",
    "eval_strategy": "Give --eval_steps: every N steps, -1 once per epoch, 0 never.",
    "evaluation_strategy": "Give --eval_steps: every N steps, -1 once per epoch, 0 never.",
    "finetuning_type": _ADAPTER,
    "fp16": "Pass --param_dtype fp16.",
    "fsdp": "Give --zero_stage 3: DeepSpeed shards the parameters then.",
    "gpus": _LAUNCHER,
    "grad_accum": _GLOBAL_BATCH,
    "gradient_accumulation": _GLOBAL_BATCH,
    "gradient_accumulation_steps": _GLOBAL_BATCH,
    "group_by_length": _BY_ITSELF,
    "hf_token": "Set the variable HF_TOKEN, or run `hf auth login`: a key does not belong on a command line.",
    "hub_model_id": "Give --push_to_hub the name.",
    "hub_private_repo": "A repository of --push_to_hub is private unless --hub_public is given.",
    "hub_token": "Set the variable HF_TOKEN, or run `hf auth login`: a key does not belong on a command line.",
    "load_best_model_at_end": "Give --keep_best a metric: the checkpoint of its best step is kept.",
    "load_in_8bit": "Pass --load_in_4bit, or leave it out: 8 bits are not supported.",
    "lora": _ADAPTER,
    "max_completion_length": "There is one limit, --max_len, for prompt and completion together; --truncation says "
    "which of them is cut.",
    "max_prompt_length": "There is one limit, --max_len, for prompt and completion together; --truncation says which "
    "of them is cut.",
    "metric_for_best_model": "Give --keep_best the metric.",
    "neftune_noise_alpha": "NEFTune is not supported. Leave it out.",
    "no_cuda": _DEVICE,
    "nproc_per_node": _LAUNCHER,
    "num_gpus": _LAUNCHER,
    "num_processes": _LAUNCHER,
    "num_workers": _BY_ITSELF,
    "optim": "The optimizer is AdamW; --adam_betas, --l2 and --adam_offload are its settings. Leave it out.",
    "optimizer": "The optimizer is AdamW; --adam_betas, --l2 and --adam_offload are its settings. Leave it out.",
    "per_device_eval_batch_size": "Evaluation runs under --micro_train_batch_size too; a whole set is one batch.",
    "per_device_train_batch_size": "Its name here is --micro_train_batch_size, which changes only speed; "
    "--train_batch_size is the global batch of a step, over all GPUs.",
    "precompute_ref_log_probs": "Pass --ref_mode cached.",
    "preprocessing_num_workers": _BY_ITSELF,
    "qlora": _ADAPTER,
    "quantization_bit": "Pass --load_in_4bit; other widths are not supported.",
    "quantization_method": "Pass --load_in_4bit; other methods are not supported.",
    "rejected_key": "Pairs are recognised by their fields prompt, chosen and rejected. Rename the field; --input_key "
    "names the prompt's.",
    "remove_unused_columns": _BY_ITSELF,
    "rl": _ONLY_KTO,
    "rlhf_type": _ONLY_KTO,
    "save_strategy": "Give --save_steps: every N steps, -1 once per epoch, 0 never.",
    "split_dataset_ratio": _HELD_OUT,
    "stage": _ONLY_KTO,
    "template": _TEMPLATE,
    "test_size": _HELD_OUT,
    "tokenizer": "The tokenizer is that of --pretrain.",
    "tokenizer_chat_template": _TEMPLATE,
    "torch_dtype": "Its name here is --param_dtype: bf16, fp16 or fp32.",
    "train_type": _ADAPTER,
    "trainer": _ONLY_KTO,
    "tuner_type": _ADAPTER,
    "use_cpu": _DEVICE,
    "use_lora": _ADAPTER,
    "use_peft": _ADAPTER,
    "val_set_size": _HELD_OUT,
    "val_size": _HELD_OUT,
    "validation_split": _HELD_OUT,
    "warmup_steps": "Give --lr_warmup_ratio, a fraction of all steps.",
}

SMALLEST_SIMILARITY = 0.7  # of difflib's ratio: betta and beta have 0.89, report_to and export_dtype 0.57


def advice_on(name: str, known: set[str], *, as_keys: bool = False) -> str:
    """Return what to do about a name that is none of the known ones.

    Args:
        as_keys: whether the settings that it names are to be written as keys of a YAML file, not as flags.
    """
    name = name.lower().replace("-", "_")
    text = f"Its name here is --{RENAMED[name]}." if name in RENAMED else ADVICE.get(name)
    if text is None:
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=SMALLEST_SIMILARITY)
        text = f"The most similar name is --{near[0]}." if near else "No flag has a similar name: see --help."
    elif not flags_in(text) <= known:
        text = "It is a setting for training only. Leave it out."
    return re.sub(r"--(\w+)", lambda m: m[1] if m[1] in known else m[0], text) if as_keys else text


def flags_in(text: str) -> set[str]:
    """Return the settings that a piece of advice names as flags; --num_gpus is the deepspeed launcher's."""
    return set(re.findall(r"--(\w+)", text)) - {"num_gpus"}

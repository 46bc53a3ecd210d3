"""Names in TRL's DPOTrainer and DPOConfig and in peft's LoraConfig, with the recipe's fields, to suggest these.

Some names are from earlier releases. docs/migrating-from-trl.md has the same table, with notes.
"""

FIELDS = {
    "model": "reference.model",
    "ref_model": "reference.model",
    "train_dataset": "data.sources",
    "eval_dataset": "data.sources",
    "processing_class": "tokenization.tokenizer",
    "truncation_mode": "tokenization.over_length",
    "loss_type": "training.loss.type",
    "loss_weights": "training.loss.of",
    "rpo_alpha": "training.loss.of",
    "f_divergence_type": "training.loss.divergence",
    "f_alpha_divergence_coef": "training.loss.divergence",
    "use_weighting": "training.loss.weighting",
    "discopop_tau": "training.loss.tau",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "training.batch_size",
    "num_train_epochs": "training.epochs",
    "optim": "training.optimizer.type",
    "adam_beta1": "training.optimizer.betas",
    "adam_beta2": "training.optimizer.betas",
    "adam_epsilon": "training.optimizer.eps",
    "lr_scheduler_type": "training.schedule.type",
    "warmup_steps": "training.schedule.warmup_ratio",
    "bf16": "training.precision",
    "router_aux_loss_coef": "training.router_aux_loss_coef",
    "peft_config": "training.adapter",
    "r": "training.adapter.rank",
    "lora_alpha": "training.adapter.alpha",
    "lora_dropout": "training.adapter.dropout",
    "gradient_checkpointing": "compute.activation_checkpointing",
    "torch_compile": "compute.compile",
    "eval_steps": "compute.evaluate_every",
    "save_steps": "compute.checkpoint_every",
    "save_total_limit": "compute.keep_checkpoints",
    "fsdp": "compute.parallel",
    "deepspeed": "compute.parallel",
}
# Names without a field in a recipe, and why.
ABSENT = {
    "max_prompt_length": "`tokenization.max_length` limits prompt and response together",
    "max_completion_length": "`tokenization.max_length` limits prompt and response together",
    "precompute_ref_log_probs": "it is always done, and the result is kept",
    "padding_free": "rows have no padding",
    "use_liger_kernel": "the head is computed in tiles anyway",
    "precompute_ref_batch_size": "batches are cut by tokens",
    "dataset_num_proc": "pairs are tokenized on all cores",
    "trust_remote_code": "code from a repository is never run",
    "load_best_model_at_end": "the policy is taken at the last step",
    "push_to_hub": "releases go to MLflow",
    "sync_ref_model": "the reference does not change",
    "report_to": "metrics go to MLflow",
    "output_dir": "everything is in PEDIGREE_HOME",
    "resume_from_checkpoint": "the same command resumes from the last checkpoint",
}
CHOICES = {
    "dpo": "sigmoid",  # open-instruct's name; TRL has the paper's loss as `sigmoid` too
    "sigmoid_norm": "dpo_norm",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
    "keep_start": "truncate_response",
    "bf16": "bfloat16",
}

"""Load the model before training, and write it afterwards."""

import shutil
import tempfile
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from training.contract.config.recipe import Compute
from training.contract.config.training import Adapter
from training.contract.identity.model_identity import adapter_fingerprint, weights_identity
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Input, Job
from training.contract.protocol.spec_files import TOKENIZER_FOLDER
from training.distributed import Group
from training.model.adapter import save_adapter, write_merged
from training.model.backbone import architecture, takes_only_text
from training.model.load import left_out, save_model
from training.model.logprobs.self_check import check_exact
from training.model.training_setup import prepare_for_training
from training.parallel.model_specs import TrainModelSpec
from training.parallel.strategy import build_params
from training.parallel.train_state import TrainableParams


def load_for_training(
    trainable: TrainModelSpec, compute: Compute, group: Group, events: EventWriter, routing: str | None = None
) -> TrainableParams:
    """Load the model on all ranks, check that it is exact, and prepare it by `compute`. Raises ModelError.

    `routing` is the one of `prepare_for_training`.
    """
    params = build_params(trainable, compute.parallel, group, events)
    _note_untrained_weights(params.model, trainable, events)
    check_exact(params.model, events, params.dtype, training=params.own_dropout)
    prepare_for_training(params.model, compute, events, params.own_dropout, trainable.float8_head, routing)
    return params


def _note_untrained_weights(model: PreTrainedModel, trainable: TrainModelSpec, events: EventWriter) -> None:
    if not takes_only_text(model) and trainable.adapter is None:
        trained, frozen = (
            sum(p.numel() for p in model.parameters() if p.requires_grad is is_trained) for is_trained in (True, False)
        )
        events.note(
            f"only the language model of {architecture(model)} is trained, {trained:,} parameters; the other {frozen:,}, for "
            f"images or sound, are saved unchanged"
        )
    if unused := left_out(model):
        events.note(
            f"weights that transformers does not use are not saved: {', '.join(unused[:3])} ({len(unused)} in all)"
        )


def write_trained(job: Job, params: TrainableParams, start: Input, adapter: Adapter | None = None) -> str:
    """Write the model, or its adapter alone, and the tokenizer into `job.staging`. Return the fingerprint.

    The folder is a Hugging Face or a peft folder. `start` is the model before training, the base of an adapter. All ranks call
    this, because each may hold a part of the weights. Rank 0 writes; the other ranks return "".
    """
    weights = params.full_weights()
    if not params.group.is_main:
        return ""
    shutil.copytree(job.inputs[AssetName.TOKENIZED_PAIRS].folder / TOKENIZER_FOLDER, job.staging, dirs_exist_ok=True)
    if adapter is None:
        save_model(params.model, job.staging, weights, params.dtype)
        return weights_identity(job.staging).fingerprint
    if not adapter.is_merged:
        return _write_adapter(params.model, weights, start, job.staging).fingerprint
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        return write_merged(_write_adapter(params.model, weights, start, Path(folder)), start, job.staging)


def _write_adapter(model: PreTrainedModel, weights: dict[str, Tensor], start: Input, folder: Path) -> Input:
    save_adapter(model, weights, folder)
    return Input(kind=AssetName.POLICY, fingerprint=adapter_fingerprint(folder, start.fingerprint), folder=folder)

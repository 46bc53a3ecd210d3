"""Where the time of a training job goes: `python -m tests.benchmarks.profile DATA`.

The workload of training.py, our side only, in one process and on one thread. Two tables:

phases       CPU-seconds of the policy job from `python` to the published artifact, imports included, with the clock of the
             process around the functions that do each
operations   of the training steps alone: self time of every operator by torch's profiler, under the innermost heading that
             it belongs to. A backward operator counts where its forward does. What no operator covers is Python between them.

The profiler slows small operators down, so the second table is in shares.
"""

import argparse
import functools
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from tests.benchmarks.setting import cpu_seconds, machine, table
from tests.benchmarks.training import arguments_of
from tests.benchmarks.workload import Workload, policy_job, prepare, reference_job
from training import loop, main, trainer
from training.checkpoint import Checkpoints
from training.contract.job import Job
from training.distributed import group
from training.model import attention, logprobs
from training.stepper import Stepper

# By how the name of an operator, or of a range that is set here, begins: the innermost ancestor that has one decides.
HEADINGS = {
    "attention": ("attention", "aten::scaled_dot_product", "ScaledDotProduct", "aten::_scaled_dot_product"),
    "head, forward": ("_TokenLogProbs",),
    "head, backward": ("_TokenLogProbsBackward",),
    "packing and plan": ("packing",),
    "optimizer": ("Optimizer.step",),
    "linears of the body": ("aten::linear", "autograd::engine::evaluate_function: MmBackward", "autograd::engine::evaluate_function: TBackward"),
    "embedding": ("aten::embedding", "autograd::engine::evaluate_function: EmbeddingBackward"),
    "adding gradients up": ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",),
    "norms, rotary positions, activations, residuals": ("aten::", "autograd::engine::evaluate_function"),
}

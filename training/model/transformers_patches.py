"""What we replace in transformers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils
from transformers.integrations import sdpa_attention

from training.contract.system.patches import replace_attribute

_SEEN_IN = "transformers 5.23"
_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def read_without_mapping() -> Iterator[None]:
    """Let transformers read tensors one by one within the block, instead of mapping the file.

    This keeps at most one copy in memory. transformers' own setting for it holds all bytes of a file twice.
    """
    original = getattr(modeling_utils, "safe_open", None)
    replace_attribute(modeling_utils, "safe_open", _with_reads, _SEEN_IN, "a model needs twice its memory to load")
    try:
        yield
    finally:
        if original is not None:
            modeling_utils.safe_open = original


def _with_reads(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    def open_to_read(file: Any, *args: Any, **kwargs: Any) -> Any:
        return safe_open(file, *args, **{**kwargs, "backend": "pread"})

    return open_to_read


def repeat_keys_in_float32() -> None:
    """Let transformers' attention repeat the keys of grouped heads for float32 on a GPU.

    torch 2.13 lacks a kernel with grouped heads for it (sdp_utils.cpp), and would keep all scores for the backward pass. For
    packed rows, `by_segment` repeats the keys itself.
    """
    otherwise = "attention in float32 on a GPU needs more memory"
    replace_attribute(sdpa_attention, "use_gqa_in_sdpa", _but_not_in_float32, _SEEN_IN, otherwise)


def _but_not_in_float32(use_gqa: Callable[[Tensor | None, Tensor, Tensor], bool]) -> Callable[..., bool]:
    def supports_groups(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
        return (not key.is_cuda or key.dtype in _HALF) and use_gqa(mask, key, value)

    return supports_groups

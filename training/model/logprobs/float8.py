"""Matrix products of 8-bit floats (e4m3: three bits of mantissa), for a faster, less exact head.

Each row of the left operand and each column of the right one is scaled so that its largest number becomes the largest of the
format. This number is exact; the others get a relative rounding error of 2.6% (root mean square). Sums are float32. The
product is bfloat16: kernels of all GPUs support this output with scales by row.

Long sums are computed in parts. With few rows and scales by row, cuBLAS on an H100 has a kernel for 3,072 terms but not for
9,216 (https://github.com/pytorch/ao/issues/4582). The gradient of the hidden states is a sum over the width of a tile.

This needs tensor cores with this format: Ada, Hopper and later (compute capability 8.9).
"""

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from training.contract.errors import ModelError

_CAPABILITY = (8, 9)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_MULTIPLE = 16  # kernels require inner and last dimensions that are multiples of this
_LONGEST = 2048


def check_float8(device: torch.device) -> None:
    """Raise ModelError unless `device` multiplies 8-bit floats."""
    if device.type != "cuda":
        present = f"the device {device}"
    elif (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        present = f"{torch.cuda.get_device_name(device)} of {'.'.join(map(str, capability))}"
    else:
        return
    raise ModelError(
        f"`training.head_precision: float8` needs a GPU of compute capability {'.'.join(map(str, _CAPABILITY))} or more "
        f"(Ada, Hopper and later), but the model is on {present}; set it to exact",
        "no-float8",
    )


def float8_product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    """Return `left @ right` of operands rounded to 8 bits, as float32."""
    parts = zip(left_NK.split(_LONGEST, dim=1), right_KM.split(_LONGEST), strict=True)
    total_NM = _product(*next(parts))
    for left, right in parts:
        total_NM.add_(_product(left, right))
    return total_NM


def _product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    columns = right_KM.shape[1]
    left, scale_N1 = _round_to_float8(_pad_rows(left_NK, 0))
    right, scale_M1 = _round_to_float8(_pad_rows(right_KM.T, -columns % _MULTIPLE))
    product_NM = torch._scaled_mm(left, right.T, scale_a=scale_N1, scale_b=scale_M1.T, out_dtype=torch.bfloat16)
    return product_NM[:, :columns].float()


def _round_to_float8(rows_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in 8 bits, contiguous, and the scale of each row.

    The large weights are rounded again for each micro-batch, so we make them contiguous after the rounding.
    """
    largest_R1 = vector_norm(rows_RK, torch.inf, dim=1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny)
    # Divide by a tensor: for a Python number a GPU multiplies by its reciprocal, which may round differently.
    scale_R1 = largest_R1 / torch.full_like(largest_R1, _LARGEST)
    return (rows_RK / scale_R1).to(torch.float8_e4m3fn).contiguous(), scale_R1


def _pad_rows(rows_RK: Tensor, extra_rows: int) -> Tensor:
    """Pad each row with zeros to a multiple of 16, and append `extra_rows` rows of zeros. Do not copy without need."""
    missing = -rows_RK.shape[1] % _MULTIPLE
    return pad(rows_RK, (0, missing, 0, extra_rows)) if missing or extra_rows else rows_RK

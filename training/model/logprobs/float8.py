"""Matrix products of 8-bit floats (e4m3: three bits of mantissa), for a head that trades exactness for speed.

Every row of the left operand and every column of the right one is scaled so that its largest number becomes the largest of
the format, which is then exact; the other numbers are rounded by 2.6% of themselves (root mean square). Sums are taken in
float32; the product is bfloat16, the one output that the kernels of all GPUs have for scales by row.

Long sums are made in parts: for few rows and 9,216 terms cuBLAS has no kernel with such scales on an H100, for 3,072 it has
(https://github.com/pytorch/ao/issues/4582). The gradient of hidden states is a sum over the width of a tile.

It needs tensor cores with this format: Ada, Hopper and later (compute capability 8.9).
"""

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from training.contract.errors import ModelError

_CAPABILITY = (8, 9)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_MULTIPLE = 16  # what kernels demand of the inner and of the last size
_LONGEST = 2048


def check_float8(device: torch.device) -> None:
    """Raise ModelError unless `device` multiplies 8-bit floats."""
    if device.type != "cuda":
        found = f"the device {device}"
    elif (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} of {'.'.join(map(str, capability))}"
    else:
        return
    raise ModelError(
        f"`training.head_precision: float8` needs a GPU of compute capability {'.'.join(map(str, _CAPABILITY))} or more "
        f"(Ada, Hopper and later), and the model is on {found}; set it to exact"
    )


def float8_product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    """`left @ right` of operands rounded to 8 bits, as float32."""
    parts = zip(left_NK.split(_LONGEST, dim=1), right_KM.split(_LONGEST), strict=True)
    total_NM = _product(*next(parts))
    for left, right in parts:
        total_NM.add_(_product(left, right))
    return total_NM


def _product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    columns = right_KM.shape[1]
    left, scale_N1 = _rounded(_padded(left_NK, 0))
    right, scale_M1 = _rounded(_padded(right_KM.T, -columns % _MULTIPLE))
    product_NM = torch._scaled_mm(left, right.T, scale_a=scale_N1, scale_b=scale_M1.T, out_dtype=torch.bfloat16)
    return product_NM[:, :columns].float()


def _rounded(rows_RK: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in 8 bits, contiguous, and the scale to multiply each by.

    Of the operands the weights are large, and are rounded anew for each micro-batch: so what is copied is copied in 8 bits.
    """
    largest_R1 = vector_norm(rows_RK, torch.inf, dim=1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny)
    # By a tensor, since to divide by a number a GPU multiplies by its reciprocal, which may round otherwise.
    scale_R1 = largest_R1 / torch.full_like(largest_R1, _LARGEST)
    return (rows_RK / scale_R1).to(torch.float8_e4m3fn).contiguous(), scale_R1


def _padded(rows_RK: Tensor, more: int) -> Tensor:
    """Each row padded with zeros to a multiple of 16, and `more` rows of zeros; itself if nothing is missing."""
    missing = -rows_RK.shape[1] % _MULTIPLE
    return pad(rows_RK, (0, missing, 0, more)) if missing or more else rows_RK

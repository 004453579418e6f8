"""Settings of this process that decide bits, and the record of them that a log carries.

Knows no model. `configure` is called once by every command before the first matrix
product; `fingerprint` reads back what is in force.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

# Beyond any machine; numbers far above it end in torch with a crash and no message.
MAX_THREADS = 1024

# Environment settings that change the bits of CPU or CUDA kernels when set.
BIT_SETTINGS = ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
                "MKL_ENABLE_INSTRUCTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
                "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
                "TORCH_BLAS_PREFER_CUBLASLT", "DISABLE_ADDMM_CUDA_LT")


# CPU features that choose other kernels, hence other bits, within one torch capability.
KERNEL_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
                "avx_vnni", "avx_ne_convert", "asimd", "bf16", "sve", "sve2")


def dtype_of(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float64` (references) as a torch dtype; others are refused."""
    if name in ("float16", "fp16", "half"):
        raise ValueError(f"dtype = {name!r}: float16 is not supported (its range overflows in "
                         "looped residual streams); use bfloat16 or float32")
    if name not in DTYPES:
        raise ValueError(f"dtype = {name!r} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The inverse of `dtype_of`."""
    return str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of reductions, head and log-softmax: float32, or float64 for references."""
    return torch.promote_types(dtype, torch.float32)


def configure(*, threads: int = 1, device: str = "cpu") -> torch.device:
    """Set thread count and the deterministic kernels of `device`; return the device.

    One thread a process is the default: with two, rows of one matrix product differ by
    their index on some CPUs. Errors: ValueError for an unknown or absent device.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads = {threads} must be at least 1 and at most {MAX_THREADS}")
    torch.set_num_threads(threads)
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r} is not supported; use cpu or cuda")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device = {device!r}: this torch ({torch.__version__}) sees no CUDA "
                             "device; use --device cpu (model.device=cpu in train)")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True)
    return torch.device(device)


def fingerprint(device: torch.device) -> dict[str, str | int]:
    """What decides bits besides model and schedule, as plain values for a log header."""
    found: dict[str, str | int] = {
        "torch": torch.__version__, "device": device.type, "threads": torch.get_num_threads(),
        "environment": ";".join(f"{k}={os.environ[k]}" for k in BIT_SETTINGS if k in os.environ),
    }
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "name": torch.cuda.get_device_name(device),
                  "cudnn": str(torch.backends.cudnn.version()),
                  "capability": ".".join(map(str, torch.cuda.get_device_capability(device)))}
    else:
        libraries = torch.__config__.show()
        found |= {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability(),
                  "cpu": _cpu(),
                  "mkl": _version_in(libraries, "Math Kernel Library Version"),
                  "onednn": _version_in(libraries, "MKL-DNN v")}
    return found


def _cpu() -> str:
    """Vendor and instruction sets by which MKL and oneDNN choose kernels; "" where unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return " ".join([fields.get("vendor_id", ""), *(flag for flag in KERNEL_FLAGS if flag in flags)]).strip()


def _version_in(text: str, label: str) -> str:
    at = text.find(label)
    return text[at + len(label):].split()[0] if at >= 0 else ""

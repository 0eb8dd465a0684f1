"""Pretended GPUs: the double of CUDA and NCCL (docs/inside/nccl-double.md), which is loaded before torch, so that torch's CUDA side and the
binding call its functions. To be imported before support.ranks."""
import ctypes
import os
import sys

if not os.environ.get("CHEVRON_GPU_DOUBLE"):
    print("skipped: no double of CUDA and NCCL in this build (CHEVRON_GPU_DOUBLE)")
    sys.exit(77)
double = ctypes.CDLL(os.environ["CHEVRON_GPU_DOUBLE"], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

double.gpu_double_install()
double.gpu_double_fill_late.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int, ctypes.c_void_p]


def fill_late(tensor, value, milliseconds=100):
    """Enqueues on the current stream a wait, and then a write of `value` to each number of a tensor in float32."""
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    double.gpu_double_fill_late(tensor.data_ptr(), tensor.numel(), value, milliseconds, stream)


def contexts():
    """The GPUs on which this process has a context, each of which takes memory."""
    return [device for device in range(8) if double.gpu_double_has_context(device)]


def communicators():
    """How many communicators of NCCL this process has joined, and not yet destroyed."""
    return double.gpu_double_communicators()

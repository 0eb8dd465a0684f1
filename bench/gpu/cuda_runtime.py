"""CUDA's runtime for the scripts of this folder, with a context on the current GPU."""
import ctypes
import sys

import torch


def load():
    """\\returns the runtime that torch uses; without a GPU the program says so and ends with 77"""
    if not torch.cuda.is_available():
        print("skipped: there is no GPU")
        sys.exit(77)
    torch.zeros(1, device="cuda")
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")

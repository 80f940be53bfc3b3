"""Everything that knows DeepSpeed: process groups, expert parallelism, the engine, optimizer state in and out."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by DeepSpeed when it is imported; saves it from guessing

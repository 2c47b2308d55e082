"""DeepSpeed, process groups and collectives."""

import os

import torch

if not torch.cuda.is_available():
    # Said before DeepSpeed's first import, which otherwise looks for an accelerator and warns that there is none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

"""What ranks of tests import, loaded once in the fork server, and left out of their garbage collections.

Without the freeze each rank's first collection, of which ZeRO 3 demands one, walks and so copies all of it.
"""

import gc
import importlib
import pkgutil
import sys

import openkto

gc.disable()
MODULES = [
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "hypothesis",
    "numpy.ctypeslib",
    "pytest",
    "safetensors.torch",
    "tensorboard.backend.event_processing.event_accumulator",
    "tests.helpers.definition",
    "tests.helpers.starts",
    "tests.text_rows",
    "tests.tiny",
    "torch._inductor.compiler_bisector",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    *(module.name for module in pkgutil.walk_packages(openkto.__path__, "openkto.") if "__main__" not in module.name),
]
for name in MODULES:
    importlib.import_module(name)
# What is built once in each process: how checkpoints of older shapes are read, for an adapter's targets.
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
LOADED = set(sys.modules)
gc.freeze()
gc.enable()

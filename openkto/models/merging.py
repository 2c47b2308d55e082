"""An adapter added to its base model's weights, as a whole model that needs no peft."""

from pathlib import Path
from typing import Any

import torch

from openkto.models.adapter import load_adapter
from openkto.models.export import check_space, export_model
from openkto.models.loading import DTYPES, load_config, load_model


def merge_adapter(
    pretrain: str, tokenizer: Any, folder: str | Path, export_dtype: str | None, *, trust_remote_code: bool = False
) -> None:
    """Write the base model of an adapter's folder with the adapter's weights added to its own.

    The sum is made in float32 and rounded once.

    Args:
        folder: there already.
        export_dtype: of the weights; None is the base model's own.

    Raises:
        ConfigError: the adapter or its base model cannot be loaded, or there is too little space.
        OpenKTOError: the folder cannot be written.
    """
    own: Any = load_config(pretrain, trust_remote_code).dtype or torch.float32
    dtype: torch.dtype = DTYPES[export_dtype] if export_dtype else own
    model = load_model(pretrain, dtype=torch.float32, trust_remote_code=trust_remote_code)
    check_space(folder, model.num_parameters(), dtype)
    # Where one of a tied pair was trained whole, peft unties them in the configuration.
    whole: Any = load_adapter(model, pretrain).merge_and_unload(safe_merge=True)
    export_model(whole.to(dtype), whole.state_dict(), tokenizer, folder, dtype, {})

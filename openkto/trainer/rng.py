"""Every random generator's state as plain arrays, so that a resumed run draws what it would have drawn."""

import random

import numpy as np
import torch

Arrays = dict[str, np.ndarray]


def rng_state(device: torch.device) -> Arrays:
    """Return the states of Python's, numpy's, torch's and, on a GPU, the device's generator."""
    version, python, gauss = random.getstate()
    assert version == 3, "Python's generator has had this form since 3.2"
    _, numpy_keys, numpy_position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    state: Arrays = {
        "python": np.array(python, dtype=np.uint32),
        "python_gauss": np.array([] if gauss is None else [gauss], dtype=np.float64),
        "numpy": np.array(numpy_keys, dtype=np.uint32),
        "numpy_position": np.array([numpy_position, has_gauss], dtype=np.int64),
        "numpy_gauss": np.array([numpy_gauss], dtype=np.float64),
        "torch": torch.get_rng_state().numpy(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device).numpy()
    return state


def set_rng_state(state: Arrays, device: torch.device) -> None:
    """Put the generators where `rng_state` found them; one that was not there then is left as it is."""
    gauss = float(state["python_gauss"][0]) if len(state["python_gauss"]) else None
    random.setstate((3, tuple(int(i) for i in state["python"]), gauss))
    position, has_gauss = (int(i) for i in state["numpy_position"])
    np.random.set_state(("MT19937", state["numpy"], position, has_gauss, float(state["numpy_gauss"][0])))
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["device"].copy()), device)

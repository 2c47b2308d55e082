"""The flags of one start of the program, which are not part of a run and not written to run.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from openkto.config.option import LARGE, option


@dataclass(frozen=True)
class RunOptions:
    """Flags that are not part of a run, and what the parser reports."""

    config: str | None = option(
        None, "a YAML file with any of these settings; flags override it", default_text="none", is_path=True
    )
    check: bool = option(False, "check the configuration and the data, train nothing")
    preview: int = option(0, "print N rows of each class as the model sees them, train nothing", "rows", at_least=0)
    debug: bool = option(False, "show an error's traceback")
    verbose: bool = option(
        False,
        "log each phase of the start, each step, each evaluation and each checkpoint, and what DeepSpeed, transformers "
        "and datasets log",
    )
    openrlhf_defaults: bool = option(
        False,
        "list the settings that were not given and whose default differs from OpenRLHF's",
        default_text="off; on if --save_steps, --logging_steps and --eval_steps are given, as in OpenRLHF's scripts",
    )
    output: str | None = option(
        None,
        "where the results go: the JSON file of evaluate, the HTML page of inspect",
        default_text="evaluation.json in --save_path, or else next to the model; inspect.html",
        is_path=True,
    )
    json: bool = option(False, "print the results as JSON")
    gpus: int | None = option(
        None, "plan for N GPUs", "GPUs", at_least=1, below=LARGE, default_text="those of this machine, or its CPU"
    )
    gpu_memory: float | None = option(None, "the memory of each", "GiB", above=0, default_text="that of the GPU here")
    tflops: float | None = option(
        None,
        "what one of them computes in a second in such a run",
        "1e12 FLOP/s",
        above=0,
        default_text="40% of a known GPU's peak; measured on this CPU; else no time is given",
    )
    given: frozenset[str] = frozenset()  # the settings given by flag or file
    note: str | None = None  # what was not given and was found beside the model
    warnings: tuple[str, ...] = ()  # allowed, but worth a second look

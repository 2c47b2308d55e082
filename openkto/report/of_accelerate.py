"""The trackers that accelerate knows beside TensorBoard and W&B, such as MLflow, Comet and trackio."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openkto.config import OutputConfig
from openkto.report.samples import Line
from openkto.report.tracker import Values, named, run_name


class OfAccelerate:
    """Hands the numbers to a tracker by accelerate's class for it.

    A start is a run of its own there: a resumed run goes on under the same name. Answers during training are not shown.
    """

    def __init__(self, name: str, output: OutputConfig, config: dict[str, Any]) -> None:
        from accelerate import tracking

        # Its logger asks for the state of an Accelerator, which would want the process group, and raises without one.
        tracking.logger = PlainLogger(logging.getLogger(tracking.__name__), {})
        names, more = arguments_of(name, output)
        self._config = config
        self._tracker = tracking.LOGGER_TYPE_TO_CLASS[name](*names, **more)
        self._tracker.main_process_only = False  # only the first rank has trackers: no need to ask that state
        self._tracker.start()

    def log(self, kind: str, step: int, values: Values) -> None:
        if kind == "run":  # the first line: what a run was made with is told once
            told = self._config | {f"run/{name}": value for name, value in values.items()}
            known = {name: value for name, value in told.items() if value is not None}
            plain = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in known.items()}
            self._tracker.store_init_configuration(plain)
        else:
            self._tracker.log(named(kind, values), step=step)

    def show_samples(self, step: int, lines: Sequence[Line]) -> None:
        pass

    def close(self) -> None:
        self._tracker.finish()


class PlainLogger(logging.LoggerAdapter):
    """What accelerate's trackers ask of their logger."""

    def warning_once(self, message: str) -> None:
        """Say, at the level of what is of no use to the user, that a value was left out."""
        self.debug(message)


def arguments_of(name: str, output: OutputConfig) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what accelerate's class for a tracker is made with: by position, and by name.

    Its first parameter is the project for some and the run for others.
    """
    folder, project, run = Path(output.save_path), output.wandb_project, run_name(output)
    arguments: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "aim": ((run, str(folder / "aim")), {"experiment": project}),
        "clearml": ((project,), {"task_name": run}),
        "comet_ml": ((project,), {}),
        "dvclive": ((), {"dir": str(folder / "dvclive"), "resume": True}),
        "mlflow": ((project,), {"run_name": run}),
        "swanlab": ((project,), {"experiment_name": run, "logdir": str(folder / "swanlab")}),
        "trackio": ((project,), {"name": run}),
    }
    return arguments[name]

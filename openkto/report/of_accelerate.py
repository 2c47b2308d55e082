"""The trackers that accelerate knows beside TensorBoard and W&B, such as MLflow, Comet and trackio."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openkto.config import OutputConfig
from openkto.report.samples import Line
from openkto.report.tracker import Values, named, run_name

# Or ClearML notes down models that are saved, flags and the terminal's text by itself.
CLEARML_RESERVE = dict.fromkeys(("auto_connect_arg_parser", "auto_connect_frameworks", "auto_connect_streams"), False)


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
        self._tracker = tracking.LOGGER_TYPE_TO_CLASS[name](*names, **more, **reserve_of(name, output))
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
        "aim": ((run, str(folder / "aim")), {"experiment": project, "capture_terminal_logs": False}),
        "clearml": ((project,), {"task_name": run, "reuse_last_task_id": False, **CLEARML_RESERVE}),
        "comet_ml": ((project,), {}),
        "dvclive": ((), {"dir": str(folder / "dvclive"), "resume": True}),
        "mlflow": ((project,), {"run_name": run}),
        "swanlab": ((project,), {"experiment_name": run, "logdir": str(folder / "swanlab")}),
        "trackio": ((project,), {"name": run}),
    }
    return arguments[name]


def reserve_of(name: str, output: OutputConfig) -> dict[str, Any]:
    """Return what keeps a package from uploading more than it is told: source code, the command line, the terminal.

    Its own classes are needed for it, so this is for a tracker that is used.
    """
    if name == "comet_ml":
        import comet_ml

        wanted = dict.fromkeys(("log_code", "log_git_metadata", "log_git_patch", "parse_args"), False)
        config = comet_ml.ExperimentConfig(name=run_name(output), auto_output_logging=False, **wanted)
        return {"experiment_config": config}
    if name == "swanlab":
        from swanlab import Settings

        # SwanLab reads the command line from the system, with whatever password stands there.
        probe, terminal = Settings.Probe(runtime=False, git=False), Settings.Terminal(proxy_type="none")
        return {"settings": Settings(interactive=False, probe=probe, terminal=terminal)}
    return {}

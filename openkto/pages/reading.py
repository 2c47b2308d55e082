"""What a run's curves mean, in words: the rules of docs/metrics.md, each with the numbers that it was drawn from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openkto.pages.run_files import Line, RunRecord, mean_over

Level = Literal["good", "note", "warning"]

FEWEST_STEPS = 20
HARDLY = 0.55  # an auc below it is hardly better than chance
INVERTED = 0.45
MUCH_KL = 10.0  # nats
A_DROP = 0.02  # of auc: a smaller one says nothing
A_GAP = 0.1  # of auc between training and evaluation rows


@dataclass(frozen=True)
class Finding:
    """One thing that the curves say, what to do about it, and where it was read."""

    level: Level
    text: str
    numbers: str


def read_curves(run: RunRecord) -> list[Finding]:
    """Return what can be said of a run, warnings first."""
    if not run.train:
        return [Finding("note", "The run has no training step yet, so there are no curves to read.", "metrics.jsonl")]
    rules: tuple[Callable[[RunRecord], list[Finding]], ...] = (
        *(_end, _length, _rate, _learning, _overfitting, _kl, _falling_rewards, _gradient),
    )
    found = [finding for rule in rules for finding in rule(run)]
    order = {"warning": 0, "good": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def ends(lines: Sequence[Line], metric: str) -> tuple[float, float] | None:
    """Return a metric's mean over the first and the last tenth of the lines that have it, at least one line each."""
    having = [line for line in lines if isinstance(line.get(metric), (int, float))]
    if len(having) < 2:
        return None
    tenth = max(1, len(having) // 10)
    first, last = mean_over(list(having[:tenth]), metric), mean_over(list(having[-tenth:]), metric)
    return None if first is None or last is None else (first, last)


def judged(run: RunRecord) -> tuple[str, Sequence[Line]]:
    """Return the lines to judge a run by: those of its first evaluation set, else its own training lines."""
    for name, lines in run.evaluations.items():
        if any("rewards/auc" in line and line["step"] > 0 for line in lines):
            return f"evaluation rows ({name})" if len(run.evaluations) > 1 else "evaluation rows", lines
    return "training rows", run.train


def _end(run: RunRecord) -> list[Finding]:
    step, total = run.train[-1]["step"], run.total_steps
    if run.is_done:
        return []
    of_total = f"step {step} of {total}" if total is not None else f"step {step}"
    text = (
        f"The run has not finished: its newest line is {of_total}. If it is no longer running, the same command with "
        "--load_checkpoint resumes it."
    )
    return [Finding("note", text, f"step {step}" + ("" if total is None else f", total_steps {total}"))]


def _length(run: RunRecord) -> list[Finding]:
    total = _total(run)
    if total >= FEWEST_STEPS:
        return []
    text = (
        f"The run has only {total} steps, too few to learn much. Lower --train_batch_size or raise --max_epochs until "
        f"there are {FEWEST_STEPS} steps or more."
    )
    return [Finding("warning", text, f"{total} steps")]


def _total(run: RunRecord) -> int:
    return int(run.total_steps or run.train[-1]["step"])


def _rate(run: RunRecord) -> list[Finding]:
    rates = [float(line["learning_rate"]) for line in run.train if "learning_rate" in line]
    norms = [float(line["grad_norm"]) for line in run.train if "grad_norm" in line]
    if rates and max(rates) == 0:
        text = "The learning rate was 0 in every step, so nothing was trained. Set --learning_rate, or add steps."
        return [Finding("warning", text, f"largest learning_rate 0 over {len(rates)} lines")]
    if norms and max(norms) == 0:
        text = "Every gradient was 0, so nothing was trained. Look at the rows with --preview 2."
        return [Finding("warning", text, f"largest grad_norm 0 over {len(norms)} lines")]
    return []


def _learning(run: RunRecord) -> list[Finding]:
    where, lines = judged(run)
    found = ends(lines, "rewards/auc")
    # Training rows are met once or twice in so few steps: how a batch is ranked says nothing of what was learned.
    if lines is run.train and _total(run) < FEWEST_STEPS:
        return []
    if found is not None:
        last = found[1]
        numbers = f"rewards/auc of the {where}: {found[0]:.3f} at first, {last:.3f} at last"
    elif where != "training rows":  # one evaluation, as of a run of one epoch
        step, last = next((line["step"], line["rewards/auc"]) for line in lines if "rewards/auc" in line)
        numbers = f"rewards/auc of the {where}: {last:.3f} at step {step}"
    else:
        return []
    if last < INVERTED:
        text = (
            "Undesirable rows have larger rewards than desirable rows. Check that the labels are not swapped: true "
            "is desirable."
        )
        return [Finding("warning", text, numbers)]
    if last < HARDLY:
        longer = "Train longer (--max_epochs) or with a larger --learning_rate, and look"
        text = (
            f"The model hardly tells desirable from undesirable {where} better than chance (0.5). "
            f"{'Look' if _last_kl(run) > MUCH_KL else longer} at the rows that are most likely mislabelled."
        )
        return [Finding("warning", text, numbers)]
    text = f"The model has learned to tell desirable from undesirable {where}: it ranks {last:.0%} of such pairs right."
    return [Finding("good", text, numbers)]


def _overfitting(run: RunRecord) -> list[Finding]:
    where, lines = judged(run)
    if where == "training rows":
        text = (
            "There are no evaluation rows, so nothing tells learning from memorising. Pass --eval_fraction or "
            "--eval_dataset."
        )
        return [Finding("note", text, "no line of kind eval with two classes")]
    auc = [(line["step"], float(line["rewards/auc"])) for line in lines if "rewards/auc" in line]
    best_step, best = max(auc, key=lambda pair: pair[1])
    last_step, last = auc[-1]
    found = []
    if best - last > A_DROP:
        text = (
            f"The {where} were ranked best at step {best_step}, and worse since. Train for fewer epochs, or pass "
            "--keep_best rewards/auc, which keeps the checkpoint of the best step."
        )
        numbers = f"rewards/auc {best:.3f} at step {best_step}, {last:.3f} at step {last_step}"
        found.append(Finding("warning", text, numbers))
    training = ends(run.train, "rewards/auc")
    if training is not None and training[1] - last > A_GAP:
        text = (
            "Training rows are ranked much better than evaluation rows: the model memorises its rows. More rows, "
            "fewer epochs or a larger --beta help."
        )
        numbers = f"rewards/auc at last: {training[1]:.3f} in training, {last:.3f} in evaluation"
        found.append(Finding("warning", text, numbers))
    return found


def _lines_with_kl(run: RunRecord) -> list[Line]:
    return [line for line in run.train if "kl" in line]


def _last_kl(run: RunRecord) -> float:
    """Return z_ref's mean over the last tenth of the lines that have it; 0 where none has."""
    having = _lines_with_kl(run)
    return mean_over(having[-max(1, len(having) // 10) :], "kl") or 0.0


def _kl(run: RunRecord) -> list[Finding]:
    having = _lines_with_kl(run)
    clamped = [line for line in having if line["kl"] == 0 and line.get("kl_unclamped", 0) < 0]
    last = _last_kl(run)
    if last > MUCH_KL:
        text = (
            f"The policy has moved far from the reference (z_ref {last:.1f} nats): answers may become strange. Lower "
            "--learning_rate or raise --beta."
        )
        return [Finding("warning", text, f"kl at last {last:.2f} nats")]
    if len(clamped) > len(having) / 2:
        text = (
            "z_ref was 0 in most steps: the policy finds the mismatched completions less likely than the reference "
            "does. That is usual and not a problem."
        )
        return [Finding("note", text, f"kl 0 with kl_unclamped below 0 in {len(clamped)} of {len(having)} lines")]
    return []


def _falling_rewards(run: RunRecord) -> list[Finding]:
    chosen, rejected = ends(run.train, "rewards/chosen"), ends(run.train, "rewards/rejected")
    margin = ends(run.train, "rewards/margins")
    if chosen is None or rejected is None or margin is None:
        return []
    numbers = f"rewards at last: desirable {chosen[1]:.3g}, undesirable {rejected[1]:.3g}; margin {margin[1]:.3g}"
    if chosen[1] < chosen[0] and rejected[1] < rejected[0] and margin[1] > margin[0]:
        text = "The rewards of both classes fall while the margin grows. That is fine: only the distance counts."
        return [Finding("note", text, numbers)]
    return []


def _gradient(run: RunRecord) -> list[Finding]:
    norms = [(line["step"], float(line["grad_norm"])) for line in run.train if "grad_norm" in line]
    limit: Any = run.settings.get("max_norm", 1.0)
    if not norms or not isinstance(limit, (int, float)) or limit <= 0:
        return []
    clipped = [step for step, norm in norms if norm > limit]
    share = len(clipped) / len(norms)
    numbers = f"grad_norm above --max_norm {limit:g} in {len(clipped)} of {len(norms)} lines"
    if share > 0.5:
        text = f"Gradients were clipped in {share:.0%} of the lines: --max_norm sets the size of the updates there."
        return [Finding("note", text, numbers)]
    return []

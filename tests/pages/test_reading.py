"""Each rule says what it should where its numbers are such, and nothing where they are not."""

import pytest

from openkto.pages.reading import read_curves
from openkto.pages.run_files import read_run
from tests.pages.made_runs import learning_run, start, summary, train_line, write_run

STEPS = range(1, 101)


def findings(folder, lines, settings="beta: 0.1\nmax_norm: 1.0\n"):
    return read_curves(read_run(write_run(folder, lines, settings)))


def texts(found, level=None):
    return [finding.text for finding in found if level in (None, finding.level)]


def a_run(**of_share):
    """Return a finished run's lines, each metric a function of the share of the run that is done."""
    lines = [train_line(step, **{name: f(step / 100) for name, f in of_share.items()}) for step in STEPS]
    return [start(100), *lines, summary(100)]


def test_a_run_that_learns_is_told_so_with_its_numbers(tmp_path):
    found = read_curves(read_run(learning_run(tmp_path)))
    assert texts(found, "warning") == []
    good = next(finding for finding in found if finding.level == "good")
    assert good.text.endswith("it ranks 85% of such pairs right.")
    assert good.numbers == "rewards/auc of the evaluation rows: 0.675 at first, 0.850 at last"


def test_a_run_that_does_not_learn_is_warned(tmp_path):
    found = findings(tmp_path, a_run(**{"rewards/auc": lambda share: 0.5}))
    assert "hardly tells desirable from undesirable" in texts(found, "warning")[0]
    assert "with a larger --learning_rate" in texts(found, "warning")[0]


def test_a_run_that_moved_far_without_learning_is_not_told_to_move_further(tmp_path):
    far = {"rewards/auc": lambda share: 0.5, "kl": lambda share: 30 * share, "kl_unclamped": lambda share: 30 * share}
    warned = texts(findings(tmp_path, a_run(**far)), "warning")
    assert "hardly tells" in warned[0]
    assert "larger --learning_rate" not in warned[0]
    assert "Lower --learning_rate" in warned[1]


def test_labels_that_seem_turned_round_are_warned_of(tmp_path):
    found = findings(tmp_path, a_run(**{"rewards/auc": lambda share: 0.5 - 0.3 * share}))
    assert "labels are not swapped" in texts(found, "warning")[0]


def test_a_run_that_was_best_before_its_end_is_told_at_which_step(tmp_path):
    lines = a_run(**{"rewards/auc": lambda share: 0.5 + 0.4 * share})
    lines[1:1] = [
        {"kind": "eval", "step": step, "rewards/auc": auc} for step, auc in ((20, 0.6), (60, 0.8), (100, 0.7))
    ]
    found = findings(tmp_path, lines)
    warned = [finding for finding in found if finding.level == "warning"]
    assert [finding.numbers for finding in warned] == [
        "rewards/auc 0.800 at step 60, 0.700 at step 100",
        "rewards/auc at last: 0.882 in training, 0.700 in evaluation",
    ]
    assert "--keep_best" in warned[0].text


def test_one_evaluation_is_enough_to_judge_a_run_by_and_one_before_training_is_not(tmp_path):
    lines = a_run(**{"rewards/auc": lambda share: 0.5 + 0.4 * share})
    after = {"kind": "eval", "step": 100, "rewards/auc": 0.52, "rewards/margins": 0.1}
    found = findings(tmp_path, [*lines[:-1], after, lines[-1]])
    assert [finding.numbers for finding in found if finding.level == "warning"] == [
        "rewards/auc of the evaluation rows: 0.520 at step 100",
        "rewards/auc at last: 0.882 in training, 0.520 in evaluation",
    ]
    assert not any("There are no evaluation rows" in text for text in texts(found))
    only_before = findings(tmp_path, [lines[0], {**after, "step": 0}, *lines[1:]])
    assert any("no evaluation" in text for text in texts(only_before))


@pytest.mark.parametrize(
    ("metrics", "level", "words"),
    [
        ({"kl": lambda s: 30 * s, "kl_unclamped": lambda s: 30 * s}, "warning", "moved far from the reference"),
        ({"kl": lambda s: 0.0, "kl_unclamped": lambda s: -1.0}, "note", "That is usual and not a problem."),
        ({"learning_rate": lambda s: 0.0}, "warning", "learning rate was 0 in every step"),
        ({"grad_norm": lambda s: 0.0}, "warning", "Every gradient was 0"),
        ({"grad_norm": lambda s: 2.0}, "note", "Gradients were clipped in 100% of the lines"),
        (
            {
                "rewards/chosen": lambda s: -s,
                "rewards/rejected": lambda s: -3 * s,
                "rewards/margins": lambda s: 2 * s,
            },
            "note",
            "The rewards of both classes fall while the margin grows. That is fine",
        ),
    ],
    ids=["kl_runs_away", "kl_is_0", "no_rate", "no_gradient", "clipped", "both_fall"],
)
def test_a_rule_speaks_where_its_numbers_are_such_and_only_there(tmp_path, metrics, level, words):
    usual = {
        "kl": lambda s: 0.1,
        "kl_unclamped": lambda s: 0.1,
        "learning_rate": lambda s: 1e-6,
        "grad_norm": lambda s: 0.5,
    }
    assert words in " ".join(texts(findings(tmp_path / "such", a_run(**usual | metrics)), level))
    assert words not in " ".join(texts(findings(tmp_path / "usual", a_run(**usual))))


def test_a_run_of_few_steps_and_one_that_has_not_finished_are_said(tmp_path):
    found = findings(tmp_path, [start(9), *[train_line(step) for step in range(1, 6)]])
    assert "only 9 steps" in " ".join(texts(found, "warning"))
    assert "its newest line is step 5 of 9" in " ".join(texts(found, "note"))


def test_training_rows_of_few_steps_are_no_sign_of_learning_and_evaluation_rows_are(tmp_path):
    lines = [start(2), train_line(1), train_line(2, **{"rewards/auc": 1.0}), summary(2)]
    assert texts(findings(tmp_path / "training", lines), "good") == []
    evaluations = [{"kind": "eval", "step": step, "rewards/auc": auc} for step, auc in ((0, 0.5), (2, 0.7))]
    (good,) = texts(findings(tmp_path / "evaluated", [*lines[:3], *evaluations, summary(2)]), "good")
    assert "evaluation rows: it ranks 70%" in good


def test_a_run_without_a_step_has_no_curves_to_read(tmp_path):
    assert [finding.level for finding in findings(tmp_path, [start()])] == ["note"]

"""The answers on a report's page: the first and the newest side by side, of one run or several."""

import json

from openkto.commands.report import main
from openkto.pages.run_files import read_run
from openkto.pages.samples import samples_of
from tests.pages.chromium import open_page
from tests.pages.made_runs import learning_run


def write_samples(folder, prompts, steps):
    with (folder / "samples.jsonl").open("w") as file:
        for step in steps:
            for i, prompt in enumerate(prompts):
                line = {"step": step, "sample": i, "source": "eval", "prompt": prompt, "completion": "<b>c</b>"}
                line |= {"label": True, "greedy": f"<i>greedy {step}</i>", "greedy_finished": True}
                file.write(json.dumps(line | {"sampled": f"sampled {step}", "sampled_finished": False}) + "\n")
    return folder


def test_the_first_and_the_newest_answers_stand_side_by_side_and_ten_between(tmp_path):
    run = read_run(write_samples(learning_run(tmp_path, 4), ["p", "q"], range(0, 230, 10)))
    samples = samples_of([run], ["run"])
    assert samples.count == 2
    question = samples.questions[0]
    assert [(one.step, one.greedy, one.sampled) for one in question.ends] == [
        (0, "<i>greedy 0</i>", "sampled 0 …"),
        (220, "<i>greedy 220</i>", "sampled 220 …"),
    ]
    assert [one.step for one in question.between] == [30, 60, 90, 120, 150, 180, 210]


def test_runs_with_other_prompts_are_shown_where_they_answered(tmp_path):
    prompts = {"a": ["p", "q"], "b": ["q", "r"]}
    runs = [read_run(write_samples(learning_run(tmp_path / name, 4), own, (0, 4))) for name, own in prompts.items()]
    samples = samples_of(runs, ["a", "b"])
    shown = {question.prompt: {one.run for one in question.ends} for question in samples.questions}
    assert shown == {"p": {"a"}, "q": {"a", "b"}, "r": {"b"}}


def test_a_line_that_was_cut_short_and_a_step_made_again_count_once(tmp_path):
    folder = write_samples(learning_run(tmp_path, 4), ["p"], (0, 4, 4))
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 8, "sam')
    run = read_run(folder)
    assert [line["step"] for line in run.samples] == [0, 4]
    assert run.problems == ["samples.jsonl: 1 lines could not be read"]


def test_answers_are_escaped_and_drawn_without_a_word_on_the_console(tmp_path):
    runs = [write_samples(learning_run(tmp_path / name, 4), ["<u>p</u>"], (0, 2, 4)) for name in ("a", "b")]
    main([*map(str, runs), "--output", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    for text in ("&lt;u&gt;p&lt;/u&gt;", "&lt;i&gt;greedy 4&lt;/i&gt;", "&lt;b&gt;c&lt;/b&gt;"):
        assert text in page
    assert "<i>greedy" not in page
    _, console = open_page(tmp_path / "page.html", tmp_path, "--window-size=390,2000")
    assert console == []

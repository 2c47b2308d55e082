import json
import logging
import re

import pytest

from openkto.commands.report import main
from openkto.errors import ConfigError
from openkto.pages.charts import MAX_POINTS, charts_of
from openkto.pages.run_files import read_run
from tests.pages.chromium import look_at_page
from tests.pages.made_runs import learning_run, start, summary, train_line, write_run

ALL_OF_THE_RUN = {"loss", "rewards", "margins", "auc", "kl", "grad_norm", "learning_rate", "histograms"}


def points_of(chart, layer=-1):
    return chart.spec["layer"][layer]["data"]["values"]


def test_a_chart_is_made_of_the_runs_own_numbers_and_none_of_what_it_has_not(tmp_path):
    charts = {chart.key: chart for chart in charts_of([read_run(learning_run(tmp_path))], ["run"])}
    assert charts.keys() == ALL_OF_THE_RUN
    loss = points_of(charts["loss"])
    assert len(loss) == 102
    assert loss[0] == {"step": 1, "value": 0.5, "series": "training"}
    assert loss[-1] == {"step": 100, "value": 0.45, "series": "evaluation"}
    band = points_of(charts["rewards"], 0)
    # At step 100 the desirable rows have the rewards 1 and 0.5: 10% and 90% of the way between them.
    assert band[-2] == {"step": 100, "low": 0.55, "high": 0.95, "series": "desirable"}


def test_a_long_runs_points_are_means_of_neighbours(tmp_path):
    lines = [train_line(step, loss=float(step)) for step in range(1, 10_001)]
    charts = charts_of([read_run(write_run(tmp_path, [start(10_000), *lines]))], ["run"])
    points = points_of(charts[0])
    assert len(points) == MAX_POINTS
    assert points[0] == {"step": 10, "value": 5.5, "series": "training"}


def test_one_evaluation_of_a_long_run_is_drawn_as_a_point_and_stands_in_its_tile(tmp_path):
    found = {"kind": "eval", "step": 100, "loss": 0.4, "rewards/auc": 0.75}
    lines = [start(100), *(train_line(step) for step in range(1, 101)), found, summary(100)]
    run = read_run(write_run(tmp_path, lines))
    chart = next(chart for chart in charts_of([run], ["run"]) if chart.key == "auc")
    assert points_of(chart, -2) == [{"step": 100, "value": 0.75, "series": "evaluation"}]
    main([str(tmp_path)])
    page = re.sub(r"\s*<[^>]+>\s*", "|", (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert re.search(r"\|AUC, evaluation rows\|+0\.75\|", page)


def test_the_histograms_of_a_third_hold_all_of_its_rows(tmp_path):
    charts = charts_of([read_run(learning_run(tmp_path))], ["run"])
    bars = charts[-1].spec["data"]["values"]
    for part in ("first third", "last third"):
        shares = [bar["share"] for bar in bars if bar["part"] == part and bar["series"] == "desirable"]
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)


def test_several_runs_share_a_chart_for_each_metric(tmp_path):
    runs = [read_run(learning_run(tmp_path / name, 20)) for name in ("a", "b")]
    charts = {chart.key: chart for chart in charts_of(runs, ["a", "b"])}
    assert {point["series"] for point in points_of(charts["loss_training_loss"])} == {"a", "b"}
    assert "rewards_training_rewards_chosen" in charts


def test_the_page_of_ten_thousand_steps_is_under_five_megabytes(tmp_path):
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracy", "kl", "kl_unclamped")
    names += ("grad_norm", "learning_rate", "logps/chosen", "logps/rejected", "tokens_per_second", "peak_memory_gb")
    lines = [train_line(step, **{name: 0.123456789 * step for name in names}) for step in range(1, 10_001)]
    write_run(tmp_path, [start(10_000), *lines, summary(10_000)])
    main([str(tmp_path)])
    assert (tmp_path / "report.html").stat().st_size < 5e6


def test_the_report_says_where_it_is_and_writes_a_picture_of_each_plot(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    main([str(learning_run(tmp_path / "run", 10)), "--output", str(tmp_path / "page.html"), "--png"])
    assert caplog.messages == [
        f"the report is in {tmp_path / 'page.html'}",
        f"{len(ALL_OF_THE_RUN)} pictures are in {tmp_path / 'page'}",
    ]
    pictures = list((tmp_path / "page").glob("*.png"))
    assert {picture.stem for picture in pictures} == ALL_OF_THE_RUN
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*: cannot be written"):
        main([str(learning_run(tmp_path / "run", 4)), "--output", str(tmp_path / "file/page.html")])


def test_the_page_escapes_what_a_run_says_and_asks_nobody(tmp_path):
    main([str(learning_run(tmp_path, 10))])
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;model&lt;/b&gt;" in page
    assert "<b>model</b>" not in page
    assert "default-src 'none'" in page
    markup = re.sub(r"(<script[^>]*>).*?</script>", r"\1</script>", page, flags=re.DOTALL)
    assert not re.search(r"(src|href|action)=|url\(", markup)


@pytest.mark.parametrize(
    ("names", "width", "is_dark"),
    [(["a"], 390, True), (["a"], 1280, False), (["a", "b"], 390, False)],
    ids=["narrow_dark", "wide_light", "two_runs_narrow_light"],
)
def test_every_plot_is_drawn_to_be_read_and_without_a_word_on_the_browsers_console(tmp_path, names, width, is_dark):
    main([*(str(learning_run(tmp_path / name, 20)) for name in names), "--output", str(tmp_path / "page.html")])
    document, console = look_at_page(tmp_path / "page.html", tmp_path, width, is_dark=is_dark)
    assert console == []
    wanted = re.findall(r'id="chart-([\w]+)"', document)
    assert len(wanted) >= len(ALL_OF_THE_RUN) - 1
    assert document.count('class="marks"') == len(wanted)


def test_planted_label_errors_are_shown_with_their_place_and_text_and_others_are_not(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": f" <i>c{i}</i>", "label": i % 2 == 0} for i in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = learning_run(tmp_path / "run", 10)
    (folder / "run.yaml").write_text(f"pretrain: model\ndataset: ['{data}']\n")
    # The model ranks rows 4 and 7 against their labels, in the later steps.
    rewards = [(1.0 if i % 2 == 0 else -1.0) * (-1 if i in (4, 7) else 1) + 0.01 * i for i in range(20)]
    line = {"step": 10, "point": 0.0, "rows": list(range(20)), "desirable": [i % 2 == 0 for i in range(20)]}
    (folder / "rewards.jsonl").write_text(json.dumps(line | {"rewards": rewards}))
    main([str(folder)])
    page = (folder / "report.html").read_text()
    assert re.findall(rf"{data}:(\d+)", page) == ["5", "8"]
    assert "&lt;i&gt;c7&lt;/i&gt;" in page
    main([str(folder), "--suspects", "0"])
    assert "most likely mislabelled" not in (folder / "report.html").read_text()


def test_suspects_whose_data_is_gone_are_shown_by_number_with_the_reason(tmp_path):
    folder = learning_run(tmp_path, 10)
    line = {"step": 10, "point": 0.0, "rows": [0, 1, 2], "desirable": [1, 1, 1], "rewards": [-1.0, 1.0, 1.1]}
    (folder / "rewards.jsonl").write_text(json.dumps(line))
    main([str(folder)])
    page = (folder / "report.html").read_text()
    assert "<td>row 0</td>" in page
    assert "Their texts cannot be shown: rows.jsonl" in page

"""What the pages state beside their commands: tokens of the worked example, and files for other systems."""

import re
import shlex
from pathlib import Path

import yaml

from docs import make_tokens
from openkto.config.flags import parse
from tests.docs.snippets import ROOT, snippets


def manifest(title: str) -> dict:
    (found,) = [snippet.code for snippet in snippets("docs/cluster.md") if snippet.title == title]
    return yaml.safe_load(found)


def test_every_page_is_in_the_navigation():
    """`make docs` refuses a page that is not; this says so without building the site."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    placed = [
        page for section in navigation for pages in section.values() for entry in pages for page in entry.values()
    ]
    assert len(placed) == len(set(placed))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(placed)


def test_the_messages_that_troubleshooting_explains_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    code = "".join(path.read_text() for path in sorted((ROOT / "openkto").rglob("*.py")))
    said = re.sub(r'"\s*\n\s*f?"', "", code)  # a sentence may stand in several pieces
    quoted = re.findall(r'\*\*"(.+?)"\*\*', page)
    assert len(quoted) >= 5
    assert [sentence for sentence in quoted if sentence not in said] == []


def test_the_tokens_page_holds_what_the_tokenizer_makes(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENKTO_CACHE", str(tmp_path))
    assert make_tokens.page().strip() in (ROOT / "docs/tokens.md").read_text()


def assert_understood(words: list[str], folder: Path) -> None:
    """Read the flags of a command of the pages as `openkto train` does; it must resume."""
    settings = folder / "run.yaml"
    settings.write_text("pretrain: some/model\ndataset: [rows.jsonl]\n")
    start = words.index("train") + 1
    config, _ = parse([str(settings) if word == "/shared/run.yaml" else word for word in words[start:]], "train")
    assert config.checkpoint.load_checkpoint is True


def test_the_kubernetes_job_replaces_a_pod_that_stopped_with_a_checkpoint(tmp_path):
    job = manifest("job.yaml")
    actions = {
        status: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {75: "Ignore", 2: "FailJob", 3: "FailJob"}
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy needs
    (container,) = pod["containers"]
    assert container["name"] == job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"][0] == "openkto"  # so that it is the process that SIGTERM reaches
    assert_understood(container["command"], tmp_path)


def test_skypilot_and_dstack_start_again_after_75(tmp_path):
    sky, dstack = manifest("sky.yaml"), manifest("kto.dstack.yml")
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert '[ "$status" = 75 ] || exit "$status"' in dstack["commands"][-1]
    for script in (sky["run"], dstack["commands"][-1]):
        (command,) = [line for line in script.splitlines() if "openkto train" in line]
        assert_understood(shlex.split(command.partition("&&")[0]), tmp_path)

"""The shells complete commands, flags and values from what `openkto completion` prints."""

import shutil
import subprocess

import pytest

from openkto.__main__ import COMMANDS
from openkto.commands import completion
from openkto.config import settings
from openkto.config.flags import TRAIN_ONLY
from openkto.errors import ConfigError


def printed(shell: str, capsys) -> str:
    completion.main([shell])
    return capsys.readouterr().out


def completed(script: str, *words: str) -> set[str]:
    """Return what bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    asked = (
        f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n_openkto\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_values(capsys):
    script = printed("bash", capsys)
    assert completed(script, "openkto", "") == set(COMMANDS)
    assert completed(script, "openkto", "tr") == {"train"}
    flags = completed(script, "openkto", "train", "--")
    assert {f"--{name}" for name in settings()} <= flags
    assert not {f"--{name}" for name in TRAIN_ONLY} & completed(script, "openkto", "evaluate", "--")
    assert completed(script, "openkto", "train", "--packing", "o") == {"on", "off"}
    assert completed(script, "openkto", "train", "--use_wandb", "") == {"true", "false"}
    assert completed(script, "openkto", "completion", "") == {"bash", "zsh"}
    assert completed(script, "openkto", "report", "--su") == {"--suspects"}
    assert completed(script, "openkto", "train", "--pretrain", "x") == set()  # bash offers files then


def test_the_script_for_zsh_offers_every_flag_with_its_meaning(capsys):
    script = printed("zsh", capsys)
    for name in settings():
        assert f"'--{name}[" in script
    assert "'--packing[" in script
    assert ":value:(auto on off)'" in script
    assert ":value:_files'" in script


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script(capsys, tmp_path):
    (tmp_path / "_openkto").write_text(printed("zsh", capsys))
    loaded = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {tmp_path}/_openkto; print $_comps[openkto]"
    done = subprocess.run(["zsh", "-fc", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("_openkto\n", "")


def test_another_shell_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"openkto completion --help says; got this: argument shell: .*fish"):
        completion.main(["fish"])

"""Writes what a shell needs to complete the command line: commands, their flags, and the values of flags."""

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from openkto.config import settings

BASH = """\
# Completion of openkto for bash: source <(openkto completion bash)
_openkto() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    elif [[ $word == -* ]]; then
        case ${COMP_WORDS[1]} in
@FLAGS@
        esac
    else
        case $before in
@VALUES@
        esac
    fi
}
# Where none of these fits, bash completes the names of files.
complete -o bashdefault -o default -F _openkto openkto
"""

ZSH = """\
#compdef openkto
# Completion of openkto for zsh: source <(openkto completion zsh), after compinit; or a file _openkto in $fpath.
_openkto() {
    local context state state_descr line
    typeset -A opt_args
    _arguments -C '1: :->command' '*:: :->flags'
    case $state in
    command)
        local -a commands
        commands=(
@COMMANDS@
        )
        _describe command commands
        ;;
    flags)
        case $words[1] in
@FLAGS@
        esac
        ;;
    esac
}
if [[ ${funcstack[1]} == _openkto ]]; then
    _openkto "$@"
else
    compdef _openkto openkto
fi
"""


@dataclass(frozen=True)
class Word:
    """A flag, or an argument without one, as a shell sees it."""

    flag: str  # "" for an argument
    help: str
    values: tuple[str, ...]
    is_path: bool
    is_switch: bool  # needs no value


def words_of(parser: argparse.ArgumentParser) -> list[Word]:
    """Return what a command's parser takes."""
    words = []
    for action in parser._actions:
        metavar = str(action.metavar)
        name = action.option_strings[-1].lstrip("-") if action.option_strings else ""
        known = settings()[name].metadata["option"].choices if name in settings() else ()
        values = ("true", "false") if metavar == "true|false" else tuple(action.choices or known)
        words.append(
            Word(
                flag=action.option_strings[-1] if action.option_strings else "",
                help=(action.help or "").replace("%%", "%"),
                values=values,
                is_path=metavar in ("PATH", "RUN", "FOLDER"),
                is_switch=action.nargs in (0, "?"),
            )
        )
    return words


def bash(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script for bash."""
    words = {command: words_of(parser) for command, parser in parsers.items()}
    flags = [_line([command], [one.flag for one in found if one.flag]) for command, found in words.items()]
    before: dict[tuple[str, ...], dict[str, None]] = {}  # the values, and what they may follow
    for command, found in words.items():
        for one in found:
            if one.values:
                before.setdefault(one.values, {})[one.flag or command] = None
    lines = [_line(names, values) for values, names in before.items()]
    filled = BASH.replace("@COMMANDS@", " ".join(parsers)).replace("@FLAGS@", "\n".join(flags))
    return filled.replace("@VALUES@", "\n".join(lines))


def _line(cases: Iterable[str], words: Iterable[str]) -> str:
    return f'        {"|".join(cases)}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;'


def zsh(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script for zsh, which shows each flag's meaning beside it."""
    commands = [f"            {_quoted(f'{name}:{parser.description}')}" for name, parser in parsers.items()]
    flags = []
    for name, parser in parsers.items():
        shown = " \\\n".join(f"                {_zsh_word(one)}" for one in words_of(parser))
        flags.append(f"        {name})\n            _arguments \\\n{shown}\n            ;;")
    return ZSH.replace("@COMMANDS@", "\n".join(commands)).replace("@FLAGS@", "\n".join(flags))


def _zsh_word(one: Word) -> str:
    action = f"({' '.join(one.values)})" if one.values else "_files" if one.is_path else " "
    if not one.flag:
        return _quoted(f"*:{_plain(one.help)}:{action}")
    about = f"{one.flag}[{_plain(one.help)}]"
    if one.is_switch and not one.values:
        return _quoted(about)
    return _quoted(f"{about}{'::' if one.is_switch else ':'}value:{action}")


def _plain(text: str) -> str:
    """Return a text in which nothing means something to `_arguments`."""
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"

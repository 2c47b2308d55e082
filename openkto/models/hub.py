"""Uploads a model to the Hugging Face Hub: its own files, without a path of this machine in them."""

import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from openkto.errors import ConfigError, OpenKTOError
from openkto.models.model_files import EXPORTED, TOKENIZER_FILES, exported_files

KEY_CURE = "Set HF_TOKEN to a key that may write, or run `hf auth login`."
NETWORK_CURE = "Check the network and try again, or leave the upload for later: `openkto push` does it."
ABOUT_THE_KEY = (401, 403)  # of HTTP


def check_repository(name: str, place: str, *, is_public: bool) -> str:
    """Return the whole name of a repository that the key at hand can write to; nothing is changed there.

    Args:
        place: the flag that gave the name.
        is_public: whether everyone may see it; one that everyone sees already must not be taken for a private one.

    Raises:
        ConfigError: there is no key, the Hub does not know it, or it may not write there.
    """
    if get_token() is None:
        raise ConfigError(f"{place}: needs a key for the Hub; got none. {KEY_CURE}")
    try:
        known = HfApi().whoami()
    except Exception as error:  # as many kinds as there are layers below
        raise ConfigError(f"{place}: the Hub must know the key; got {reason_of(error)}. {_cure(error)}") from error
    user = known["name"]
    owner, _, own_name = name.rpartition("/")
    owners = [user, *(organisation["name"] for organisation in known.get("orgs", []))]
    if owner and owner not in owners:
        raise ConfigError(
            f"{place}: must name a repository of {' or '.join(owners)}, whose key this is; got {name}. Correct the "
            "name, or take another key."
        )
    if known.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"{place}: needs a key that may write; got one that may only read. {KEY_CURE}")
    whole = f"{owner or user}/{own_name}"
    try:
        is_seen = not HfApi().model_info(whole).private
    except RepositoryNotFoundError:
        return whole
    except Exception as error:
        raise ConfigError(f"{place}: {whole} must answer; got {reason_of(error)}. {_cure(error)}") from error
    if is_seen and not is_public:
        raise ConfigError(
            f"{place}: must be private, or be given as public; got {whole}, which is there and everyone sees. Make it "
            "private on the Hub, say that it is to be public, or name another."
        )
    return whole


def make_repository(name: str, place: str, *, is_public: bool) -> None:
    """Make the repository, unless it is there; its visibility is then as it was.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        HfApi().create_repo(name, private=not is_public, exist_ok=True)
    except Exception as error:
        raise ConfigError(f"{place}: {name} must be made on the Hub; got {reason_of(error)}. {_cure(error)}") from error


def upload(folder: Path, name: str, more: Mapping[str, bytes]) -> str:
    """Upload a model's or an adapter's files in one commit; return its address.

    What an earlier upload left of another model is deleted there: a model with parts of another is none.

    Args:
        more: what is to lie beside them, by name.

    Raises:
        OpenKTOError: it did not succeed.
    """
    files = [file for file in model_files(folder) if file not in more]
    added = [CommitOperationAdd(file, _content(folder / file)) for file in files]
    added += [CommitOperationAdd(file, content) for file, content in more.items()]
    try:
        left = [file for file in HfApi().list_repo_files(name) if file not in {*files, *more}]
        deleted = [CommitOperationDelete(file) for file in left if any(fnmatch.fnmatch(file, p) for p in EXPORTED)]
        message = "Upload a model trained with OpenKTO"
        return str(HfApi().create_commit(name, [*added, *deleted], commit_message=message).repo_url)
    except Exception as error:
        raise OpenKTOError(f"{name}: the model must be uploaded there; got {reason_of(error)}.") from error


def model_files(folder: Path) -> list[str]:
    """Return the files that make the model or adapter of a folder, by their names in it."""
    found = {folder / name for name in exported_files(folder)}
    for path in {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}:
        found |= {inner for inner in path.rglob("*") if inner.is_file()} if path.is_dir() else {path}
    if any(b'"auto_map"' in path.read_bytes() for path in found if path.suffix == ".json"):
        found |= set(folder.glob("*.py"))  # the model's or the tokenizer's own code
    return sorted(str(path.relative_to(folder)) for path in found)


def reason_of(error: Exception) -> str:
    """Say in a few words why the Hub could not be asked; its own message may be long."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE=1, which keeps it from being asked"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        said = error.server_message or {401: "unknown key", 403: "no permission"}.get(status, "no reason")
        return f"status {status} ({said.strip().splitlines()[0]})"
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} ({first_line.rstrip('.')})"


def _cure(error: Exception) -> str:
    """Return what helps: another key only where the Hub has answered that this one is wrong."""
    if isinstance(error, OfflineModeIsEnabled):
        return "Unset it, or leave the upload for later: `openkto push` does it."
    is_key = isinstance(error, HfHubHTTPError) and error.response.status_code in ABOUT_THE_KEY
    return KEY_CURE if is_key else NETWORK_CURE


def _content(file: Path) -> bytes | str:
    """Return a file's path, or its content where that names a folder of this machine."""
    if file.suffix != ".json" or file.name == "tokenizer.json":
        return str(file)
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        return str(file)
    places = {key: value for key, value in values.items() if isinstance(value, str) and _is_place(key, value)}
    if not places:
        return str(file)
    shown = {key: PureWindowsPath(value).name for key, value in places.items()}  # it knows both kinds of slashes
    return (json.dumps(values | shown, indent=2, ensure_ascii=False) + "\n").encode()


def _is_place(key: str, value: str) -> bool:
    is_absolute = os.path.isabs(value) or PureWindowsPath(value).is_absolute() or value.startswith("~")
    return (is_absolute and "\n" not in value) or (key.endswith("name_or_path") and os.path.isdir(value))

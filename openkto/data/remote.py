"""Remote files (https://, s3://, hf://, zip://...), fetched once by their address and read as local ones.

A copy's name holds the address and what says that the file there is still the same: its ETag or time, and its size.
So a file that has changed is fetched again, and each start asks no more than that. All but http goes through fsspec.
"""

import base64
import contextlib
import hashlib
import logging
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from openkto.data.problems import data_error, shorten
from openkto.errors import DataError
from openkto.files import delete_leftovers, flush_to_disk, scratch_name
from openkto.masking import HTTP, masked_for, name_of_address

log = logging.getLogger(__name__)

ADDRESS = re.compile(r"\w[\w+.-]*://")
TIMEOUT_SECONDS = 60.0  # without a byte
GLOB_CHARACTERS = set("*?[")


@dataclass(frozen=True)
class Remote:
    """A file elsewhere, under a name without what may be secret."""

    name: str
    version: str  # another one for other content; empty where the server says nothing
    size: int | None
    open: Callable[[], Any]


def is_address(item: str) -> bool:
    """Return whether an item of --dataset is an address, and no path on this machine."""
    return ADDRESS.match(item) is not None and not item.startswith("file://")


def local_copies(address: str, folder: Path) -> list[tuple[Path, str]]:
    """Return the copies, in `folder`, of the files at an address or of a pattern there, each with its name.

    Raises:
        DataError: there is none, or it cannot be read or kept.
    """
    name = name_of_address(address)
    try:
        found = [_at_http(address)] if address.startswith(HTTP) else _by_fsspec(address)
    except ImportError as error:
        protocol = address.partition("://")[0]
        advice = str(known_implementations.get(protocol, {}).get("err", error))
        got = f"a Python without the package for {protocol}"
        raise data_error(name, "needs a package to be read", got, advice.rstrip(".") + ".") from None
    except FileNotFoundError:
        raise data_error(name, "must be an existing file", "no such file there", "Correct the address.") from None
    except Exception as error:  # networks, credentials: as many types as there are file systems
        raise _cannot_read(address, error) from None
    if not found:
        raise data_error(name, "must match at least one file", "no match", "Correct the pattern.")
    return [(_copy(file, address, folder), file.name) for file in found]


def _at_http(address: str) -> Remote:
    def open_it() -> Any:
        return urllib.request.urlopen(_request(address), timeout=TIMEOUT_SECONDS)

    try:
        with open_it() as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise FileNotFoundError(address) from None
        raise
    length = headers.get("Content-Length", "")
    version = headers.get("ETag") or headers.get("Last-Modified") or ""
    return Remote(name_of_address(address), version and f"{version} {length}", int(length) if length else None, open_it)


def _request(address: str) -> urllib.request.Request:
    """Return what asks for an address; a user and password in it go into a header, and not to where it redirects."""
    parts = urllib.parse.urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host, fragment="")))
    if at:
        code = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {code}")
    return request


def _by_fsspec(address: str) -> list[Remote]:
    system, path = fsspec.url_to_fs(address)
    archive = address.partition("::")[2]  # zip://rows.jsonl::s3://bucket/all.zip

    def remote(path: str) -> Remote:
        info = system.info(path)
        name = f"{archive}/{path}" if archive else str(system.unstrip_protocol(path))
        size = info.get("size")
        return Remote(name_of_address(name), system.ukey(path), size, lambda: system.open(path, "rb"))

    if GLOB_CHARACTERS & set(path):
        return [remote(match) for match in sorted(system.glob(path)) if system.isfile(match)]
    if system.isdir(path):
        cure = "Add a pattern, such as /*.jsonl; a dataset on the Hub is named as owner/name."
        raise data_error(name_of_address(address), "must be a file or a pattern of files", "a folder", cure)
    return [remote(path)]


def _copy(file: Remote, address: str, folder: Path) -> Path:
    """Return where the file's copy lies, fetched if it is not there; a half one has another name."""
    key = hashlib.sha256(f"{file.name}\n{file.version}".encode()).hexdigest()[:32]
    target = folder / key
    if file.version and target.is_file():
        return target
    log.info("data: fetching %s%s", file.name, "" if file.size is None else f" ({file.size / 2**20:.1f} MiB)")
    scratch = folder / scratch_name(key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        delete_leftovers(folder)
        with file.open() as source, scratch.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
        got = scratch.stat().st_size
        if file.size is not None and got != file.size:
            raise OSError(f"{got} bytes of {file.size}")
        flush_to_disk(scratch)
        os.replace(scratch, target)
    except Exception as error:
        raise _cannot_read(address, error) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
    return target


def _cannot_read(address: str, error: Exception) -> Exception:
    if isinstance(error, DataError):
        return error
    said = masked_for(address, " ".join(str(error).split())) or type(error).__name__
    cure = "Check the address, the credentials and the network."
    return data_error(name_of_address(address), "must be readable from here", shorten(said, 160), cure)

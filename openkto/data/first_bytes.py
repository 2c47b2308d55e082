"""Recognise, by its first bytes, a file that is not what its name says, before a reader opens it."""

from openkto.data.problems import data_error
from openkto.data.readers import TEXT_CONTAINERS
from openkto.data.text_files import DataFile

HEAD_BYTES = 256
NAMED = (
    (b"\x1f\x8b", "a gzip file", ".gz"),
    (b"BZh", "a bzip2 file", ".bz2"),
    (b"\xfd7zXZ", "an xz file", ".xz"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", ".zst"),
    (b"PAR1", "a Parquet file", ".parquet"),
    (b"ARROW1", "an Arrow file", ".arrow"),
)


def check_first_bytes(file: DataFile) -> None:
    """Raise DataError for a file that is plainly something else; OSError where it cannot be opened."""
    with file.path.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    if head.startswith(b"version https://git-lfs"):
        cure = "Fetch the file itself, as git lfs pull does."
        raise data_error(file.name, "must hold the rows themselves", "a pointer of Git LFS to them", cure)
    if file.container not in TEXT_CONTAINERS or file.compression:
        return
    for magic, what, suffix in NAMED:
        if head.startswith(magic):
            cure = f"Let its name end in {suffix}."
            raise data_error(file.name, "must be the text that its name says", what, cure)
    if head.startswith(b"PK\x03\x04"):
        cure = "Unpack it; export a sheet of Excel as CSV."
        raise data_error(file.name, "must be the text that its name says", "a zip file, as .xlsx files are", cure)
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        cure = "Download the file itself; a page may ask to log in."
        raise data_error(file.name, "must hold rows", "a web page", cure)

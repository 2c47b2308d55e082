"""Which wheels a GPU machine without a network lacks for OpenKTO and TRL, and where to get them.

    python -m benchmarks.gpu.wheels                          # lists them
    python -m benchmarks.gpu.wheels --download .whl          # collects them there, with pip's network; about 8 MB

The machine is taken to have torch 2.11, transformers 5.17, accelerate and peft on Python 3.12. There:

    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target .site .whl/*.whl
    PYTHONPATH=.site python3 -m benchmarks.gpu
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PYTHON = "3.12"
BUILT = ["deepspeed==0.19.8"]  # pure Python, published as source: its operators are built where they run
NEEDED = [
    "hjson", "pydantic", "annotated-types", "typing-inspection", "typing-extensions", "datasets==5.2.0", "dill",
    "multiprocess", "tensorboard==2.21.0", "tqdm", "trl==1.16.0", "liger-kernel",
]  # fmt: skip
OF_PYDANTIC = "pydantic-core"  # the one release that pydantic's wheel asks for
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def main(argv: list[str]) -> None:
    """List the wheels, or collect them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="collect the wheels there")
    parser.add_argument("more", nargs="*", metavar="PACKAGE", help="anything else, as pip names it")
    args = parser.parse_args(argv)
    if args.download is None:
        print("\n".join([*BUILT, *NEEDED, OF_PYDANTIC, *args.more]))
        return
    args.download.mkdir(parents=True, exist_ok=True)
    pip("wheel", "--no-deps", "-w", str(args.download), *BUILT)
    download(args.download, [*NEEDED, *args.more])
    download(args.download, [f"{OF_PYDANTIC}=={core_version(args.download)}"])
    for wheel in sorted(args.download.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:7.2f} MiB  {wheel.name}")


def download(folder: Path, packages: list[str]) -> None:
    """Fetch these packages' wheels for that machine's Python, without what they need themselves."""
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    which = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    pip("download", "--no-deps", *which, "-d", str(folder), *packages)


def core_version(folder: Path) -> str:
    """Return the release of pydantic-core that the collected pydantic asks for."""
    (wheel,) = folder.glob("pydantic-[0-9]*.whl")
    with zipfile.ZipFile(wheel) as content:
        name = next(name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        found = re.search(r"^Requires-Dist: pydantic-core==([0-9.]+)", content.read(name).decode(), re.MULTILINE)
    assert found, f"{wheel.name} names one release of pydantic-core"
    return found.group(1)


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", words[0], "--quiet", *words[1:]], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])

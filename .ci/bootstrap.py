"""Makes the virtual environment that `make` uses; the next run finds it up to date and returns.

Standard library only: it must run on a machine with nothing but Python and pip. It knows no package
host: pip's own configuration decides where packages come from, and `TORCH_INDEX_URL`, if set, where
torch alone comes from.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
OLDEST = ROOT / ".ci" / "oldest.txt"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
OLDEST_TORCH, FIRST_TORCH_TOO_NEW = (2, 11), (2, 15)
STAMP = "nanoserve-setup.stamp"


def main() -> int:
    """Bring the virtual environment up to date; returns the exit status of the command."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--venv", type=Path, default=Path(".venv"), help="where it is made (default: .venv)"
    )
    options.add_argument("--extra", help="also install this optional group of pyproject.toml")
    options.add_argument(
        "--oldest", action="store_true", help="also put the oldest transformers into <venv>/oldest"
    )
    given = options.parse_args()
    venv = ROOT / given.venv
    try:
        check_python(sys.version_info[:2])
        set_up(venv)
        if given.extra is not None:
            add_extra(venv, given.extra)
        if given.oldest:
            add_oldest(venv)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def check_python(version: tuple[int, int]) -> None:
    """Raise SetupError unless this Python is one that nanoserve supports."""
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return
    raise SetupError(
        f"this is Python {dotted(version)}; nanoserve needs {dotted(OLDEST_PYTHON)} to "
        f"{dotted(NEWEST_PYTHON)}. Name another one: make setup PYTHON=python3.12"
    )


def set_up(venv: Path) -> None:
    """Make `venv` and install into it, unless its stamp says that this was done already."""
    fingerprint = fingerprint_of_inputs()
    stamp = venv / STAMP
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return
    python = venv / "bin" / "python"
    if not python.exists():
        make_venv(venv)
    check_venv(venv)
    borrowed = borrow_cuda_torch(venv) if has_nvidia_driver() else None
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(constraints_text(borrowed))
        if borrowed is None:
            install_torch(python, constraints)
        say("installing nanoserve and its development tools")
        pip(python, "install", "--editable", f"{ROOT}[dev]", "--constraint", str(constraints))
    stamp.write_text(fingerprint)
    say(f"ready: {venv}")


def add_extra(venv: Path, extra: str) -> None:
    """Install an optional group into `venv`, unless its stamp says that this was done already.

    Under the constraints, with the torch that is there: a group never changes a pinned version.
    """
    fingerprint = fingerprint_of_inputs()
    stamp = venv / f"{STAMP}.{extra}"
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return
    say(f"installing the optional group {extra}")
    pip(
        venv / "bin" / "python", "install", "--editable", f"{ROOT}[{extra}]", "-c", str(CONSTRAINTS)
    )
    stamp.write_text(fingerprint)


def add_oldest(venv: Path) -> None:
    """Put the packages of `OLDEST` into the folder ``venv/oldest``, unless they are there.

    A folder on PYTHONPATH goes before the environment's packages, so all others are shared: a
    second environment would hold a second torch.
    """
    fingerprint = fingerprint_of_inputs()
    stamp = venv / f"{STAMP}.oldest"
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return
    say("installing the oldest supported transformers beside the newest")
    shutil.rmtree(venv / "oldest", ignore_errors=True)
    target = ["--no-deps", "--target", str(venv / "oldest"), "--requirement", str(OLDEST)]
    pip(venv / "bin" / "python", "install", *target)
    stamp.write_text(fingerprint)


def fingerprint_of_inputs() -> str:
    """Everything that decides what gets installed, as one hash."""
    digest = hashlib.sha256(f"{sys.version_info[:3]} {ROOT}".encode())
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, OLDEST, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv(venv: Path) -> None:
    """Create an empty virtual environment, without pip where this Python cannot give it one."""
    say(f"making a virtual environment in {venv} (Python {platform.python_version()})")
    bundled_pip = importlib.util.find_spec("ensurepip") is not None
    run([sys.executable, "-m", "venv", *([] if bundled_pip else ["--without-pip"]), str(venv)])


def check_venv(venv: Path) -> None:
    """Raise SetupError if `venv` was made by another Python than the one that runs this."""
    running = dotted(sys.version_info[:2])
    for line in (venv / "pyvenv.cfg").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "version" and not value.strip().startswith(f"{running}."):
            raise SetupError(
                f"{venv} holds Python {value.strip()}, but this is Python {running}. "
                "Run `make distclean` first, or name that Python: make setup PYTHON=..."
            )


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is visible from here; touches no GPU and starts no process."""
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def borrow_cuda_torch(venv: Path) -> str | None:
    """Lend `venv` a CUDA torch that the running Python already has; returns its version, or None.

    A `.pth` line does it and not `--system-site-packages`, which shows nothing when the running
    Python is itself in a virtual environment. What `venv` holds itself comes first on its path.
    """
    probe = "import torch; print(torch.__version__, torch.cuda.is_available(), torch.__path__[0])"
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    fields = found.stdout.split(maxsplit=2)
    if found.returncode != 0 or len(fields) != 3 or fields[1] != "True":
        return None
    version, site_packages = fields[0], Path(fields[2].strip()).parent
    if not OLDEST_TORCH <= release(version) < FIRST_TORCH_TOO_NEW:
        return None
    say(f"torch: using the CUDA build {version} that {sys.executable} has")
    for own in venv.glob("lib/python*/site-packages"):
        (own / "borrowed_torch.pth").write_text(f"{site_packages}\n")
    return version


def install_torch(python: Path, constraints: Path) -> None:
    """Install the pinned torch, from TORCH_INDEX_URL if set, else from wherever pip looks."""
    index = os.environ.get("TORCH_INDEX_URL")
    if index:
        say(f"torch: installing from TORCH_INDEX_URL ({index})")
    elif has_nvidia_driver():
        say(
            "torch: NVIDIA driver found, so a CUDA build is wanted; installing what pip's index has"
        )
    else:
        say("torch: no NVIDIA driver found, a CPU build will do; installing what pip's index has")
        say(
            "torch: should that be a CUDA build of several GB, stop here and set TORCH_INDEX_URL to"
        )
        say("torch: the CPU index that pytorch.org's install page names; it serves torch alone")
    source = ["--index-url", index] if index else []
    pip(python, "install", "torch", "--constraint", str(constraints), *source)


def constraints_text(torch_version: str | None) -> str:
    """The pinned versions, with `torch_version` in place of the pinned torch if one is lent."""
    lines = CONSTRAINTS.read_text().splitlines()
    if torch_version is not None:
        lines = [line for line in lines if not line.startswith("torch==")]
        lines.append(f"torch=={torch_version}")
    return "\n".join(lines) + "\n"


def pip(python: Path, *arguments: str) -> None:
    """Run pip for the environment of `python`, with its own pip or else the running Python's."""
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]  # errors only
    if next(python.parent.glob("pip*"), None):
        run([str(python), "-m", "pip", *arguments, *quiet])
    else:
        run([sys.executable, "-m", "pip", "--python", str(python), *arguments, *quiet])


def run(command: list[str]) -> None:
    """Run one command to its end; raises SetupError with the command if it fails."""
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError(f"this failed, see above: {' '.join(command)}")


def release(version: str) -> tuple[int, int]:
    """'2.13.0+cpu' -> (2, 13)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def dotted(version: tuple[int, int]) -> str:
    """(3, 10) -> '3.10'."""
    return f"{version[0]}.{version[1]}"


def say(line: str) -> None:
    """Tell the person at the terminal what takes the time."""
    print(f"setup: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

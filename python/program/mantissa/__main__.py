"""Starts the program of this wheel with the libraries that it finds at run time: NVIDIA's from wheels beside it, and UCX."""
import ctypes
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def system_has_ucx() -> bool:
    """True if the system's loader finds UCX, whose modules know the network cards of this host."""
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError:
        return False
    return True


def library_folders(system_ucx: bool) -> list[str]:
    """Folders to search behind those of LD_LIBRARY_PATH: NVIDIA's wheels, and the wheel's own UCX where the system has none."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [folder for root in (nvidia.submodule_search_locations if nvidia else []) for folder in sorted(Path(root).glob("*/lib"))]
    if not system_ucx:
        folders.append(HERE / "lib" / "ucx")
    return [str(folder) for folder in folders]


def main() -> None:
    """Becomes the program: its exit code and signals are those of this process."""
    given = os.environ.get("LD_LIBRARY_PATH")
    folders = ([given] if given else []) + library_folders(system_has_ucx())
    program = str(HERE / "bin" / "mantissa")
    environment = dict(os.environ, LD_LIBRARY_PATH=":".join(folders)) if folders else os.environ
    os.execve(program, [program, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()

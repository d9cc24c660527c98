"""Compile the CPU kernels at install time (called by `build_hook.py`, or `python deploy/build_kernels.py [op ...]`).

Each `<op>/cpu.cpp` of `services/algorithms/ops` (serving) and of `services/offline/training` becomes
`cpu-<instruction set>.so` beside it; `services.algorithms.native` loads the best one that the running processor has.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-fno-math-errno")
# x86-64-v4 is AVX-512 (Intel since 2017, AMD since 2022); its int8 dot products came a generation later.
X86_FLAGS = {
    "avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "baseline": (),
}


def build_kernels(root: Path = ROOT, ops: Sequence[str] = ()) -> list[Path]:
    """The libraries written, of all ops or of those named.

    Raises: RuntimeError without a C++ compiler, or with its message when a source does not compile.
    """
    algorithms, training = root / "services" / "algorithms", root / "services" / "offline" / "training"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++, c++ or CXX): Freshet's CPU kernels are compiled when it is installed")
    flags = X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}
    found = [*sorted(algorithms.glob("ops/*/cpu.cpp")), *sorted(training.glob("*/cpu.cpp"))]
    sources = [source for source in found if not ops or source.parent.name in ops]
    work = [(source, source.with_name(f"cpu-{name}.so"), flags[name]) for source in sources for name in flags]
    processor = algorithms / "native" / "processor.cpp"
    work.append((processor, processor.with_suffix(".so"), ()))

    def compile_one(source: Path, library: Path, instruction_set: Sequence[str]) -> Path:
        aside = library.with_suffix(f".{os.getpid()}.tmp")
        include = f"-I{algorithms / 'native'}"
        command = [compiler, *COMMON_FLAGS, *instruction_set, include, str(source), "-o", str(aside)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        return aside.rename(library)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compile_one, *zip(*work, strict=True)))


if __name__ == "__main__":
    build_kernels(ops=sys.argv[1:])

"""What pyproject.toml cannot say: the kernel for decoding on the CPU, where a compiler is at hand.

Without one the installation goes on, and torch's operations do the kernel's work.
"""

import hashlib
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "kvalloc/runtime/attention/cpu.c"
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-Wno-psabi"]
if platform.machine() == "x86_64":
    FLAGS += ["-mavx2", "-mfma", "-mf16c"]

kernel = Extension(
    "kvalloc.runtime.attention._cpu",
    [SOURCE],
    # By it `kvalloc.runtime.attention.cpu` knows a library that was built from this very source.
    define_macros=[("SOURCE_DIGEST", hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest())],
    extra_compile_args=FLAGS,
    libraries=["m"],
    optional=True,
)
setup(ext_modules=[kernel] if sys.platform == "linux" else [])

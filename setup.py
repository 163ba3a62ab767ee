"""Metadata, extras and the optional C extensions. Settings of the tools: pyproject.toml."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"
(VERSION,) = re.findall(r'__version__ = "(.+)"', (HERE / "megatron_d3/__init__.py").read_text())

# Optional: where no compiler is found, the same loops run in Python with the same results.
COMPILED = ("plan/_apportion", "influence/solvers/_solver", "influence/_sketch")

EXTRAS = {
    # Megatron's training loop imports nothing else. psutil: its torch_dist checkpoints;
    # sentencepiece: its tokenizers; tensorboard: its metrics.
    "megatron": [
        "megatron-core>=0.19.2,<0.21",
        "torch>=2.6",
        "psutil",
        "sentencepiece>=0.2",
        "tensorboard>=2.16",
    ],
    # On NVIDIA GPUs. In an NGC container torch and Transformer Engine are there already: install
    # without this extra. Apex is not the package of that name on PyPI; see the README.
    "gpu": ["transformer-engine[pytorch]>=2.0"],
    "mpi": ["mpi4py>=4.0"],
    "plot": ["matplotlib>=3.8"],
    # What `megatron-d3 tokenize` reads beside SentencePiece models and .jsonl or .txt files.
    "hf": ["tokenizers>=0.20", "pyarrow>=16"],
    "tokenizers": ["tokenizers>=0.20"],
    "tiktoken": ["tiktoken>=0.7"],
    "parquet": ["pyarrow>=16"],
    "zstd": ["zstandard>=0.22"],
    # The back end of `megatron-d3 mix propose --back-end regmix`.
    "regmix": ["scikit-learn>=1.5"],
    # With what every test needs: file formats, tokenizers, and an MPI that needs no root.
    "dev": [
        "pytest>=8",
        "hypothesis>=6.100",
        "ruff>=0.12",
        "mypy>=1.15",
        "types-PyYAML",
        "tokenizers>=0.20",
        "tiktoken>=0.7",
        "pyarrow>=16",
        "zstandard>=0.22",
        "mpi4py>=4.0",
        "mpich>=4.2; sys_platform == 'linux'",
    ],
}

setup(
    name="megatron-d3",
    version=VERSION,
    description="A data scheduler for LLM pretraining on stock Megatron-Core",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: C",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_d3", "megatron_d3.*"]),
    package_data={"megatron_d3": ["py.typed", "influence/*.h", *(f"{name}.c" for name in COMPILED)]},
    ext_modules=[
        Extension(
            f"megatron_d3.{name.replace('/', '.')}",
            [f"megatron_d3/{name}.c"],
            depends=["megatron_d3/influence/_sketch_kernels.h"],
            # The same bits from every compiler and processor: no fused multiply-add.
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno"],
            optional=True,
        )
        for name in COMPILED
    ],
    install_requires=["numpy>=1.26", "pyyaml>=6"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-d3 = megatron_d3.cli.main:main"]},
)

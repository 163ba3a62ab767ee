"""Token losses of a model over the draws of a plan, stored once and read by later runs.

    <folder>/losses.json   what they belong to; written last: without it there is nothing
    <folder>/0000.f32      (num_draws, seq_length) little-endian float32, nats: domain 0, ...

A row is found by domain and draw number (the ordinal of `plan.json`), so any run that draws the same
samples of the same corpora can read it, in whatever order, on any layout. Another corpus, seed,
tokenizer or sequence length is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.plan.files import explained
from megatron_d3.plan.header import RunHeader

VERSION = 1
HEADER = "losses.json"
WHERE = "d3.mix.losses"


def _identity(header: RunHeader) -> dict[str, Any]:
    """What must be the same for two runs to have the same token losses under one model."""
    return {
        "seq_length": header.seq_length,
        "tokenizer": header.tokenizer,
        "seed": header.seed,
        "domains": [{"name": d.name, "fingerprint": d.fingerprint} for d in header.domains],
    }


def _rows(path: Path, num_draws: int, seq_length: int, *, mode: Any) -> np.ndarray:
    if num_draws == 0:  # an empty file cannot be mapped
        return np.zeros((0, seq_length), "<f4")
    return np.memmap(path, "<f4", mode=mode, shape=(num_draws, seq_length))


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.f32"


class TokenLossWriter:
    """Fills the rows of a folder that takes its name when it is complete.

    One process calls :meth:`create` and :meth:`publish`; any number may write rows between them.

    Args:
        folder: final name.
        header: of the run whose draws are measured.
        num_draws: (K,) draws of each domain.
    """

    def __init__(self, folder: Path, header: RunHeader, num_draws: Sequence[int]) -> None:
        self._folder = folder
        self._aside = folder.with_name(folder.name + ".tmp")
        self._header = header
        self._num_draws = [int(n) for n in num_draws]
        self._arrays: list[np.ndarray] | None = None

    def create(self) -> None:
        """Make the files.

        Raises:
            PlanError: there are losses already, or the disk refuses.
        """
        if self._folder.exists():
            raise PlanError(f"{self._folder}: exists; remove it, or give another folder")
        with explained(self._aside, "write"):
            shutil.rmtree(self._aside, ignore_errors=True)  # an unfinished attempt
            self._aside.mkdir(parents=True)
            for index, count in enumerate(self._num_draws):
                with open(_path(self._aside, index), "wb") as file:
                    file.truncate(count * self._header.seq_length * 4)

    def write(self, domain: int, ordinal: int, losses: np.ndarray) -> None:
        """Store the (seq_length,) losses of one draw."""
        if self._arrays is None:
            self._arrays = [
                _rows(_path(self._aside, index), count, self._header.seq_length, mode="r+")
                for index, count in enumerate(self._num_draws)]
        self._arrays[domain][ordinal] = losses

    def flush(self) -> None:
        """Hand this process's rows to the file system."""
        for array in self._arrays or ():
            if isinstance(array, np.memmap):
                array.flush()

    def publish(self, *, reference: str) -> None:
        """Write the header and give the folder its name, once all processes have flushed.

        Args:
            reference: where the model came from, for the reader.
        """
        content = {"version": VERSION, "reference": reference, **_identity(self._header),
                   "num_draws": self._num_draws}
        with explained(self._aside, "write"):
            (self._aside / HEADER).write_text(json.dumps(content, indent=1) + "\n")
            self._aside.rename(self._folder)


class TokenLosses:
    """Stored token losses, read through memory maps.

    Args:
        folder: as written by :class:`TokenLossWriter`.
        header: of the run that wants to read them.

    Raises:
        ConfigError: there are none, or they belong to other samples.
    """

    def __init__(self, folder: Path, header: RunHeader) -> None:
        try:
            content = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{WHERE}: no stored losses in {folder} ({HEADER}: {error.strerror}); write them "
                "with `megatron-d3 doremi losses`") from error
        except ValueError as error:
            raise ConfigError(f"{WHERE}: {folder / HEADER} is not JSON: {error}") from error
        if content.get("version") != VERSION:
            raise ConfigError(f"{WHERE}: {folder} has version {content.get('version')}, this "
                              f"Megatron-D3 reads {VERSION}; write it again")
        for key, wanted in _identity(header).items():
            if content.get(key) != wanted:
                raise ConfigError(
                    f"{WHERE}: {folder} was made with another {key}: {_short(content.get(key))}, "
                    f"this run has {_short(wanted)}; write the losses again for this run")
        self._names = header.names
        self._folder = folder
        self._arrays = [_rows(_path(folder, index), count, header.seq_length, mode="r")
                        for index, count in enumerate(content["num_draws"])]

    def read(self, domain: int, ordinal: int) -> np.ndarray:
        """Return the (seq_length,) float32 losses of one draw, nats.

        Raises:
            PlanError: that draw was not measured.
        """
        rows = self._arrays[domain]
        if ordinal >= len(rows):
            raise PlanError(
                f"{self._folder}: holds {len(rows)} draws of {self._names[domain]}, this run needs "
                f"draw {ordinal}; write the losses for a run of this length")
        row: np.ndarray = rows[ordinal]
        return row


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."

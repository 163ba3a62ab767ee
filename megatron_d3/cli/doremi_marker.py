"""`<run>.json` beside a run of `megatron-d3 doremi`: what it was trained from, and whether it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_d3.errors import D3Error
from megatron_d3.plan.reader import LEDGER, PlanReader
from megatron_d3.plan.replay import Replay
from megatron_d3.plan.rows import LossRow, last_line, parsed
from megatron_d3.planning import decider_factory


class StoppedEarlyError(D3Error):
    """A run left in good order before its end; the same command continues it."""


class Marker:
    """The file of one run.

    Args:
        save: the run's folder.
        arguments: its flags.
        config: its configuration.

    Raises:
        D3Error: the run that is there was trained from others.
    """

    def __init__(self, save: Path, arguments: Sequence[str], config: dict[str, Any]) -> None:
        self._save = save
        self._path = path_of(save)
        self._made_from = {
            "arguments": list(arguments), "settings": json.loads(json.dumps(config))}
        if self._path.exists():
            before = json.loads(self._path.read_text(encoding="utf-8"))["made_from"]
            for key, value in self._made_from.items():
                if before.get(key) != value:
                    raise D3Error(
                        f"{save}: was trained from other {key}: "
                        f"{_difference(before.get(key, {}), value)}; "
                        "give another doremi.folder, or move this run away")
        else:
            self._write(is_finished=False)

    def finish(self) -> None:
        """Note that the run came to its end.

        Raises:
            StoppedEarlyError: it did not, though no error ended it: `--exit-interval`,
                `--exit-duration-in-mins`, a signal with `--exit-signal-handler`.
        """
        trained, planned = _how_far(self._save / "d3")
        if trained < planned:
            raise StoppedEarlyError(
                f"{self._save}: stopped after {trained:,} of {planned:,} samples without an error "
                "(an exit flag, or a signal); the same command continues")
        self._write(is_finished=True)

    def _write(self, *, is_finished: bool) -> None:
        content = {"made_from": self._made_from, "is_finished": is_finished}
        write(self._path, json.dumps(content, indent=1) + "\n")


def path_of(save: Path) -> Path:
    """Return the marker of a run."""
    return save.with_name(f"{save.name}.json")


def is_finished(save: Path) -> bool:
    """Whether the run in a folder came to its end."""
    path = path_of(save)
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["is_finished"])


def _how_far(plan_dir: Path) -> tuple[int, int]:
    """Return samples trained on, and how many the run will be trained on."""
    reader = PlanReader(plan_dir)
    header = reader.plan.generations[-1].header
    found = last_line(plan_dir / LEDGER)
    trained = (parsed(plan_dir / LEDGER, found[0], LossRow).consumed or 0) if found else 0
    if trained < header.total_samples and header.config["mix"]["exhausted"] == "stop":
        replay = Replay(reader, decider_factory())
        for _ in replay.rounds():
            pass
        if replay.decider.decide(replay.state) is None:
            return trained, replay.state.position
    return trained, header.total_samples


def _difference(old: Any, new: Any) -> str:
    """Say where two recipes part."""
    if isinstance(new, dict):
        before, now = _flat(old), _flat(new)
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return ", ".join(f"{key} was {before.get(key)}, now {now.get(key)}" for key in keys)
    gone = [word for word in old if word not in new]
    come = [word for word in new if word not in old]
    return f"was {' '.join(map(str, gone)) or 'less'}, now {' '.join(map(str, come)) or 'less'}"


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {
            prefix + key: value}
    return found


def write(path: Path, text: str) -> None:
    """Replace a file by text, whole or not at all."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)

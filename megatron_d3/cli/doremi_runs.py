"""The three steps of DoReMi as ordinary training runs, each resumed where it stopped.

    FOLDER/round-1/reference/     checkpoints and plan; reference.yaml, reference.log beside it
    FOLDER/round-1/losses/        with `stored_losses`
    FOLDER/round-1/proxy/
    FOLDER/round-1/weights.json   and trajectory.csv: what the proxy found
    FOLDER/round-2/...            with `--iterate`: its reference is trained on round 1's weights
    FOLDER/weights.json           those of the last round
    FOLDER/final/

A step that is finished is reused; another recipe for it is refused. Nothing is deleted.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from megatron_d3.cli.doremi_file import DoremiFile
from megatron_d3.cli.doremi_result import first_weights, read_proxy
from megatron_d3.cli.progress import Progress
from megatron_d3.cli.torchrun import cpu_environment, train
from megatron_d3.config import RunConfig
from megatron_d3.errors import ConfigError, D3Error

WEIGHTS = "weights.json"
TRAJECTORY = "trajectory.csv"
_STORE = "megatron_d3.mcore.store_losses"


@dataclass(frozen=True)
class Doremi:
    """What is trained, and where the words go.

    Attributes:
        file: the recipe.
        config: the domains, and the first reference's mixture.
        stream: for progress.
    """

    file: DoremiFile
    config: RunConfig
    stream: TextIO

    def run(self, *, is_iterated: bool) -> Path:
        """Train whatever is not finished.

        Args:
            is_iterated: repeat reference and proxy until the weights stay.

        Returns:
            the file of the weights.

        Raises:
            D3Error: a run failed, or was made from another recipe.
        """
        mix = self.config.to_dict()["mix"]
        for number in range(1, (self.file.max_rounds if is_iterated else 1) + 1):
            folder = self.file.folder / f"round-{number}"
            weights = self._round(folder, mix)
            change = weights["max_change_from_reference"]
            self._say(f"round {number:<4}max |alpha_bar - alpha_ref| = {change:.4f}, the stop rule "
                      f"asks for less than {self.file.tolerance:g}")
            _write(self.file.folder / WEIGHTS, json.dumps(
                weights | {"round": number, "trajectory": f"{folder.name}/{TRAJECTORY}"}, indent=1))
            if change < self.file.tolerance:
                break
            mix = self._static(folder / WEIGHTS)
        if self.file.final is not None:
            self._train(self.file.folder / "final", self._static(self.file.folder / WEIGHTS),
                        self.file.final.flags)
        return self.file.folder / WEIGHTS

    def _round(self, folder: Path, mix: dict[str, Any]) -> dict[str, Any]:
        """Train a reference and a proxy, write the weights; return their content."""
        reference, proxy = folder / "reference", folder / "proxy"
        settings = self.file.proxy
        self._train(reference, mix, self.file.reference.flags)
        found: dict[str, Any] = {
            "type": "doremi", "reference": str(reference), "eta": settings.eta, "c": settings.c,
            "variant": settings.variant, "initial_score": settings.initial_score}
        found |= {key: mix[key] for key in ("max_epochs", "exhausted")}
        if settings.stored_losses:
            losses = folder / "losses"
            self._store_losses(losses, found)
            found = {key: value for key, value in found.items() if key != "reference"}
            found["losses"] = str(losses)
        self._train(proxy, found, settings.flags)
        result = read_proxy(proxy / "d3")
        content = result.to_dict(first_weights(reference / "d3"), trajectory=TRAJECTORY)
        _write(folder / TRAJECTORY, result.to_csv())
        _write(folder / WEIGHTS, json.dumps(content, indent=1) + "\n")
        return content

    def _static(self, weights: Path) -> dict[str, Any]:
        named = json.loads(weights.read_text(encoding="utf-8"))["weights"]
        mix = self.config.to_dict()["mix"]
        return {"type": "static", "weights": named, "max_epochs": mix["max_epochs"],
                "exhausted": mix["exhausted"]}

    def _train(self, save: Path, mix: dict[str, Any], flags: Sequence[Path]) -> None:
        """Train one run to its end, from its last checkpoint if it has one."""
        arguments = self._arguments(save, mix, flags)
        marker = _Marker(save, arguments, mix)
        name = save.name
        if marker.is_finished():
            self._say(f"{name:<10}finished before, reused")
            return
        latest = save / "latest_checkpointed_iteration.txt"
        if latest.exists():
            self._say(f"{name:<10}continues from its checkpoint at step {latest.read_text().strip()}")
        progress = Progress(name, save / "d3", self.stream)
        try:
            self._torchrun(arguments, save, poll=progress.poll)
        except BaseException:
            progress.abandon()
            raise
        progress.finish()
        marker.finish()

    def _store_losses(self, losses: Path, mix: dict[str, Any]) -> None:
        if losses.exists():
            self._say("losses    stored before, reused")
            return
        arguments = self._arguments(losses, mix, self.file.proxy.flags)
        self._say("losses    the reference reads what the proxy will draw")
        at = arguments.index("--save")
        arguments[at:at + 4] = ["--d3-plan-dir", str(losses)]
        self._torchrun(arguments, losses, module=_STORE)

    def _arguments(self, save: Path, mix: dict[str, Any], flags: Sequence[Path]) -> list[str]:
        """Write the run's configuration and return the flags of `megatron_d3.pretrain`."""
        save.parent.mkdir(parents=True, exist_ok=True)
        config = save.with_name(f"{save.name}.yaml")
        content = self.config.to_dict() | {"mix": mix}
        _write(config, yaml.safe_dump(content, sort_keys=False))
        arguments = [word for path in (*self.file.flags, *flags)
                     for word in shlex.split(path.read_text(encoding="utf-8"), comments=True)]
        if self.file.tokenizer_model is not None:
            arguments += ["--tokenizer-type", "SentencePieceTokenizer",
                          "--tokenizer-model", str(self.file.tokenizer_model)]
        return [*arguments, "--save", str(save), "--load", str(save), "--d3-config", str(config)]

    def _torchrun(self, arguments: Sequence[str], save: Path, **how: Any) -> None:
        num_processes = self.file.num_processes
        environment = cpu_environment(num_processes) if _is_cpu() else dict(os.environ)
        train(arguments, log=save.with_name(f"{save.name}.log"), num_processes=num_processes,
              environment=environment, **how)

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class _Marker:
    """`<run>.json` beside a run: what it was trained from, and whether it is finished."""

    def __init__(self, save: Path, arguments: Sequence[str], mix: dict[str, Any]) -> None:
        self._path = save.with_name(f"{save.name}.json")
        self._made_from = {"arguments": list(arguments), "mix": json.loads(json.dumps(mix))}
        if self._path.exists():
            before = json.loads(self._path.read_text(encoding="utf-8"))["made_from"]
            for key, value in self._made_from.items():
                if before[key] != value:
                    raise D3Error(
                        f"{save}: was trained from other {key}: {_difference(before[key], value)}; "
                        "give another doremi.folder, or move this run away")
        else:
            self._write(is_finished=False)

    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(json.loads(self._path.read_text(encoding="utf-8"))["is_finished"])

    def finish(self) -> None:
        """The run came to its end."""
        self._write(is_finished=True)

    def _write(self, *, is_finished: bool) -> None:
        content = {"made_from": self._made_from, "is_finished": is_finished}
        _write(self._path, json.dumps(content, indent=1) + "\n")


def _difference(old: Any, new: Any) -> str:
    """Say where two recipes part."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        return ", ".join(f"{key} was {old.get(key)}, now {new.get(key)}" for key in keys)
    gone = [word for word in old if word not in new]
    come = [word for word in new if word not in old]
    return f"was {' '.join(map(str, gone)) or 'less'}, now {' '.join(map(str, come)) or 'less'}"


def store_losses(out: Path, arguments: Sequence[str], *, num_processes: int) -> None:
    """Store the token losses of a proxy's reference: `megatron-d3 doremi losses`.

    Args:
        out: folder to make.
        arguments: flags of the proxy's run.
        num_processes: on this machine.

    Raises:
        D3Error: it failed.
    """
    if "--d3-config" not in arguments:
        raise ConfigError("megatron-d3 doremi losses: give the proxy's flags after --, with "
                          "--d3-config and mix: {type: doremi, reference: PATH}")
    out.parent.mkdir(parents=True, exist_ok=True)
    environment = cpu_environment(num_processes) if _is_cpu() else dict(os.environ)
    train([*arguments, "--d3-plan-dir", str(out)], log=out.with_name(f"{out.name}.log"),
          num_processes=num_processes, environment=environment, module=_STORE)


def _is_cpu() -> bool:
    """Whether the runs will be on the CPU, as `mcore/cpu.py` decides it."""
    device = os.environ.get("MEGATRON_D3_DEVICE", "")
    if device:
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)

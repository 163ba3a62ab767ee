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
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from megatron_d3.cli.doremi_file import DoremiFile
from megatron_d3.cli.doremi_marker import Marker, is_finished, write
from megatron_d3.cli.doremi_result import first_weights, read_proxy
from megatron_d3.cli.progress import Progress
from megatron_d3.cli.torchrun import launch_environment, train
from megatron_d3.config import RunConfig
from megatron_d3.errors import ConfigError, D3Error
from megatron_d3.mix.weights import require_domains

STEPS = ("reference", "losses", "proxy", "final")
"""What can be a job of its own; `losses` only with `stored_losses`."""

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
        launcher: command that starts `-m MODULE ARGUMENTS` in all processes of a run; default
            torchrun with the recipe's `num_processes` on this machine.
    """

    file: DoremiFile
    config: RunConfig
    stream: TextIO
    launcher: Sequence[str] = ()

    def run(self, *, is_iterated: bool) -> Path:
        """Train whatever is not finished.

        Args:
            is_iterated: repeat reference and proxy until the weights stay.

        Returns:
            the file of the weights.

        Raises:
            D3Error: a run failed, or was made from another recipe.
        """
        last = self._last_round()
        if last > 1 and not is_iterated:
            raise D3Error(f"{self.file.folder}: holds {last} rounds; continue them with --iterate, "
                          "or give another doremi.folder")
        for number in range(1, (self.file.max_rounds if is_iterated else 1) + 1):
            self._reference(number)
            if self.file.proxy.stored_losses:
                self._losses(number)
            self._proxy(number)
            if self._has_settled(number):
                break
        if self.file.final is not None:
            self._final()
        return self.file.folder / WEIGHTS

    def step(self, name: str, *, number: int = 1) -> None:
        """Train one step if it is not finished: what one of several jobs does.

        Args:
            name: one of :data:`STEPS`.
            number: round of `--iterate`; a round after the stop rule was met has nothing to do.

        Raises:
            ConfigError: the recipe has no such step or round.
            D3Error: the step before is not finished; or see :meth:`run`.
        """
        file = self.file
        if number > file.max_rounds:
            raise ConfigError(f"--round: got {number}, doremi.max_rounds is {file.max_rounds}")
        if name == "losses" and not file.proxy.stored_losses:
            raise ConfigError("--step losses: doremi.proxy.stored_losses is false: the proxy runs "
                              "beside its reference model and needs no stored losses")
        if name == "final" and file.final is None:
            raise ConfigError("--step final: the recipe has no `final`")
        if name == "final":
            self._require(file.folder / WEIGHTS, name, "proxy", 1)
            return self._final()
        if number > 1:
            self._require(self._folder(number - 1) / WEIGHTS, name, "proxy", number - 1)
            if settled := [n for n in range(1, number) if self._has_settled(n, is_quiet=True)]:
                return self._say(f"{name:<10}not needed: the stop rule was met in round "
                                 f"{settled[0]}")
        reference = self._folder(number) / "reference"
        if name != "reference" and not is_finished(reference):
            self._require(None, name, "reference", number)
        if name == "proxy" and file.proxy.stored_losses:
            self._require(self._folder(number) / "losses", name, "losses", number)
        {"reference": self._reference, "losses": self._losses, "proxy": self._proxy}[name](number)

    def _require(self, result: Path | None, name: str, before: str, number: int) -> None:
        if result is not None and result.exists():
            return
        which = "" if number == 1 else f" --round {number}"
        raise D3Error(
            f"--step {name}: the step before it is not finished: {before} of round {number} in "
            f"{self._folder(number)}; run --step {before}{which} first")

    def _folder(self, number: int) -> Path:
        return self.file.folder / f"round-{number}"

    def _reference(self, number: int) -> None:
        mix = self.config.to_dict()["mix"]
        if number > 1:
            mix = self._static(self._folder(number - 1) / WEIGHTS)
        self._train(self._folder(number) / "reference", mix, self.file.reference.flags)

    def _losses(self, number: int) -> None:
        self._store_losses(self._folder(number) / "losses", self._proxy_mix(number))

    def _proxy(self, number: int) -> None:
        """Train the proxy and write what it found."""
        folder, mix = self._folder(number), self._proxy_mix(number)
        if self.file.proxy.stored_losses:
            mix = {key: value for key, value in mix.items() if key != "reference"}
            mix["losses"] = str(folder / "losses")
        self._train(folder / "proxy", mix, self.file.proxy.flags)
        result = read_proxy(folder / "proxy" / "d3")
        content = result.to_dict(first_weights(folder / "reference" / "d3"), trajectory=TRAJECTORY)
        write(folder / TRAJECTORY, result.to_csv())
        write(folder / WEIGHTS, json.dumps(content, indent=1) + "\n")
        if number >= self._last_round():
            write(self.file.folder / WEIGHTS, json.dumps(
                content | {"round": number, "trajectory": f"{folder.name}/{TRAJECTORY}"}, indent=1))

    def _final(self) -> None:
        self._train(self.file.folder / "final", self._static(self.file.folder / WEIGHTS),
                    self.file.final.flags if self.file.final else ())

    def _last_round(self) -> int:
        """Return the last round whose proxy is finished, 0 if there is none."""
        path = self.file.folder / WEIGHTS
        return int(json.loads(path.read_text(encoding="utf-8"))["round"]) if path.exists() else 0

    def _has_settled(self, number: int, *, is_quiet: bool = False) -> bool:
        """Whether a round's weights are its reference's: the stop rule."""
        content = json.loads((self._folder(number) / WEIGHTS).read_text(encoding="utf-8"))
        change = float(content["max_change_from_reference"])
        if not is_quiet:
            self._say(f"round {number:<4}max |alpha_bar - alpha_ref| = {change:.4f}, the stop rule "
                      f"asks for less than {self.file.tolerance:g}")
        return change < self.file.tolerance

    def _proxy_mix(self, number: int) -> dict[str, Any]:
        settings, mix = self.file.proxy, self.config.to_dict()["mix"]
        return {
            "type": "doremi", "reference": str(self._folder(number) / "reference"),
            "eta": settings.eta, "c": settings.c, "variant": settings.variant,
            "initial_score": settings.initial_score, "max_epochs": mix["max_epochs"],
            "exhausted": mix["exhausted"]}

    def _static(self, weights: Path) -> dict[str, Any]:
        named = json.loads(weights.read_text(encoding="utf-8"))["weights"]
        require_domains(named, list(self.config.domains), str(weights), what="weight")
        mix = self.config.to_dict()["mix"]
        return {"type": "static", "weights": named, "max_epochs": mix["max_epochs"],
                "exhausted": mix["exhausted"]}

    def _train(self, save: Path, mix: dict[str, Any], flags: Sequence[Path]) -> None:
        """Train one run to its end, from its last checkpoint if it has one."""
        arguments = self._arguments(save, mix, flags)
        marker = Marker(save, arguments, self.config.to_dict() | {"mix": mix})
        name = save.name
        if is_finished(save):
            self._say(f"{name:<10}finished before, reused")
            return
        latest = save / "latest_checkpointed_iteration.txt"
        if latest.exists():
            self._say(f"{name:<10}continues from its checkpoint at step {latest.read_text().strip()}")
        progress = Progress(name, save / "d3", self.stream)
        try:
            self._launch(arguments, save, poll=progress.poll)
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
        self._launch(arguments, losses, module=_STORE)

    def _arguments(self, save: Path, mix: dict[str, Any], flags: Sequence[Path]) -> list[str]:
        """Write the run's configuration and return the flags of `megatron_d3.pretrain`."""
        save.parent.mkdir(parents=True, exist_ok=True)
        config = save.with_name(f"{save.name}.yaml")
        content = self.config.to_dict() | {"mix": mix}
        write(config, yaml.safe_dump(content, sort_keys=False))
        arguments = [word for path in (*self.file.flags, *flags)
                     for word in shlex.split(path.read_text(encoding="utf-8"), comments=True)]
        if self.file.tokenizer_model is not None:
            arguments += ["--tokenizer-type", "SentencePieceTokenizer",
                          "--tokenizer-model", str(self.file.tokenizer_model)]
        return [*arguments, "--save", str(save), "--load", str(save), "--d3-config", str(config)]

    def _launch(self, arguments: Sequence[str], save: Path, **how: Any) -> None:
        num_processes = self.file.num_processes
        train(arguments, log=save.with_name(f"{save.name}.log"), num_processes=num_processes,
              environment=launch_environment(num_processes), launcher=self.launcher, **how)

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


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
    train([*arguments, "--d3-plan-dir", str(out)], log=out.with_name(f"{out.name}.log"),
          num_processes=num_processes, environment=launch_environment(num_processes),
          module=_STORE)


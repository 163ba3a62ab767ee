"""`slurm/pretrain_d3.sh` filled in: the settings and `#SBATCH` lines replaced, nothing else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_d3.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
"""The checkout of the repository; jobs run from there."""

SCRIPT = CHECKOUT / "slurm" / "pretrain_d3.sh"
PRESETS = CHECKOUT / "examples" / "models"

_SETTING = r"^{name}=\$\{{{name}:?-[^}}]*\}}+(?= )"
_END_OF_SETTINGS = "# --- everything else follows"


def filled(
    settings: Mapping[str, str], options: Mapping[str, str], flags: Sequence[str] = (),
    *, script: Path = SCRIPT,
) -> str:
    """Return the job script with everything in it, so that it can be read and run again.

    Args:
        settings: by the script's names, e.g. `MODEL`.
        options: of sbatch by long name, e.g. `nodes`; an empty value stands for a bare option.
        flags: Megatron's, after the script's own.
        script: the script to fill.

    Raises:
        ConfigError: the script is missing, or knows no such setting.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{script}: cannot be read: {error.strerror}; `megatron-d3 launch` needs "
                          "a checkout of the repository") from error
    for name, value in settings.items():
        found = re.search(_SETTING.format(name=name), text, re.MULTILINE)
        if found is None:
            raise ConfigError(f"{script}: has no setting {name}")
        text = _put(text, found, f"{name}={shlex.quote(value)}")
    for name, value in options.items():
        line = f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")
        found = re.search(rf"^#SBATCH --{re.escape(name)}(=.*)?$", text, re.MULTILINE)
        if found is None:
            line, found = f"{line}\n#SBATCH --requeue", re.search(r"^#SBATCH --requeue$", text,
                                                                  re.MULTILINE)
            assert found is not None, script
        text = _put(text, found, line)
    if flags:
        at = text.index(_END_OF_SETTINGS)
        text = f"{text[:at]}set -- {shlex.join(flags)}\n\n{text[at:]}"
    return text


def _put(text: str, found: re.Match[str], line: str) -> str:
    return text[:found.start()] + line + text[found.end():]


def require_model(model: str) -> str:
    """Return `MODEL` with files as absolute paths.

    Raises:
        ConfigError: a name is neither a file nor a preset.
    """
    known = sorted(path.stem for path in PRESETS.glob("*.args"))
    words = []
    for name in model.split():
        if Path(name).is_file():
            words.append(str(Path(name).absolute()))
        elif name in known:
            words.append(name)
        else:
            raise ConfigError(
                f"--model: {name} is neither a file of flags nor one of {', '.join(known)}")
    if not words:
        raise ConfigError(f"--model: empty, expected one or more of {', '.join(known)}")
    return " ".join(words)

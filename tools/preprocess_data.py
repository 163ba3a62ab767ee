"""Text files to one .bin/.idx: a thin door to `megatron-d3 tokenize`, with the same flags.

python tools/preprocess_data.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_d3.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tokenize", *sys.argv[1:]]))

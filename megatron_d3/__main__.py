"""`python -m megatron_d3 VERB`: the same as `megatron-d3 VERB`."""

import sys

from megatron_d3.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

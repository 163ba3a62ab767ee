"""`python -m megatron_d3.pretrain`: Megatron's GPT pretraining, its data decided by a plan.

Takes every flag of Megatron and the `--d3-*` flags; start it with `torchrun`. Without `--d3-config`
it is stock Megatron.
"""

import time

if __name__ == "__main__":
    _started_at = time.time()  # before the heavy imports: Megatron reports how long they take

    from megatron_d3.mcore.pretrain import main

    main(started_at=_started_at)

"""`python -m megatron_d3.mcore.store_losses`: store a DoReMi reference's token losses once.

Takes the flags of the proxy's run, whose `mix: {type: doremi, reference: PATH}` names the model, and
writes the losses of every sample that the run will draw to `--d3-plan-dir`. Start it with
`torchrun`, or through `megatron-d3 doremi losses`. Nothing is trained.
"""

from __future__ import annotations


def main() -> None:
    """Run the reference over the draws, on the layout that the flags ask for."""
    from megatron_d3.mcore import pretrain

    def store(setup: object, args: object) -> None:
        from megatron_d3.mcore import stored_losses  # not before Megatron's CPU switch

        stored_losses.store(setup, args)

    pretrain.main(task=store)


if __name__ == "__main__":
    main()

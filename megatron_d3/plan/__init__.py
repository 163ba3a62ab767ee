"""The plan: which sample of which domain stands at each position, decided while training runs.

    mixer weights -> Decider -> Segment -> PlanStore -> positions.bin -> training -> StepSignals
                       ^                                                                 |
                       +------------------------ observe ------------------------------+

    batch_schedule.py  samples per training step
    dealing.py         which rank trains on which position
    apportion.py       weights into a sequence of domains, never more than about 1 sample off
    segment.py         the positions of one round, and their hash
    state.py           `DeciderState`: all that a decision depends on besides the settings
    protocols.py       what a mixer and a cap must offer
    decide.py          `Decider`: pure; one round from state and settings
    draft.py           windows: the next units together, committed in an order found for them
    header.py          `plan.json`: settings, domain table, generations
    rows.py            the rows of the three logs
    windows.py         what was measured in each window
    files.py           crash-safe writing
    snapshot.py        stored scheduler states
    reader.py          `PlanReader`: any plan directory, memory-mapped
    store.py           `PlanStore`: the one writer
    generations.py     what a change of the settings keeps
    replay.py          computes a plan again and compares
    reach.py           what a plan had come to at a checkpoint
    resume.py          continues a plan from a checkpoint
    draws.py           which samples were drawn: none twice
    audit.py           checks a whole plan
    summary.py         what a plan did, in numbers
    compare.py         where two plans part, and why
    keeper.py          `PlanKeeper` and `PlanFollower`: what the training loop calls
"""

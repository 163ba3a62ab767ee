"""The plan: which sample of which domain stands at each position, decided while training runs.

    mixer weights -> Decider -> Segment -> PlanStore -> positions.bin -> training -> StepSignals
                       ^                                                                 |
                       +------------------------ observe ------------------------------+

    batch_schedule.py  samples per training step
    apportion.py       weights into a sequence of domains, never more than about 1 sample off
    segment.py         the positions of one round, and their hash
    state.py           `DeciderState`: all that a decision depends on besides the settings
    decide.py          `Decider`: pure; one round from state and settings
    header.py          `plan.json`: settings, domain table, generations
    rows.py            the rows of the three logs
    files.py           crash-safe writing
    snapshot.py        stored scheduler states
    reader.py          `PlanReader`: any plan directory, memory-mapped
    store.py           `PlanStore`: the one writer
    replay.py          computes a plan again and compares
    reach.py           what a plan had come to at a checkpoint
    resume.py          continues a plan from a checkpoint
    audit.py           checks a whole plan
    summary.py         what a plan did, in numbers
    compare.py         where two plans part, and why
    keeper.py          `PlanKeeper` and `PlanFollower`: what the training loop calls
"""

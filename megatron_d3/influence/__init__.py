"""D3: order the units of a window by their measured influence on each other.

    gradients, curvature ── sketch ── estimator ── S (L, L) ── objective, solver ── order (L,)
         (the model)       sketch.py  estimators/   graph.py   objectives.py, solvers/

A *unit* is one global batch, a *window* L consecutive units. `S_ij > 0` says that unit i had better
be trained on before unit j; the order sought violates as little of S as possible.

Source: "D^3: Dynamic Directional Graph-Constrained Data Scheduling for LLM Training"
(arXiv 2605.31164). Importing this package, or its `settings`, `graph`, `solvers` and `objectives`,
loads no torch.
"""

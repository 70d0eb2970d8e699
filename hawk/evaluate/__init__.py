"""The paper's evaluation on the machine at hand: `hawk evaluate`.

Three kinds of figures stand in one report and are never mixed up: what was *measured here*, what was *measured
elsewhere* and read from its JSON, and what is *simulated* from inputs that are each marked with where they come from.

    records      figures, tables, inputs, and where each of their numbers comes from
    here         what this machine can measure, one benchmark after the other, each into a JSON file
    sources      such files, of this machine or another, read and checked
    transfers    Figure 9; machines: what else was measured
    paper        the paper's numbers, each with its place
    simulated    rates, knees and efficiencies from `hawk.serving`, beside the paper's
    plots, page  figures as SVG, and everything as one HTML page
    output       the folder: the page, a CSV for each figure and table, a summary as JSON
    run          all of it, in order
"""

from __future__ import annotations

from hawk.evaluate.run import Options, Outcome, evaluate

__all__ = ["Options", "Outcome", "evaluate"]

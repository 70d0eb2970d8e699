"""The paper's numbers, each with the place where it stands.

Its tables' bodies and its figures' points are not in its text.  Ratios of Figure 9 are at its smallest and its largest
transfer.  GN-HAWK's share is printed as one of GN-Host (77.25 % to 14.69 %); with the 0.65 % from GG-Direct that is
printed beside it, it can only be one of GG-Host, as which it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL, LARGE = 10.0, 1280.0
"""MB of the smallest and the largest transfer."""

FIGURE_9 = {
    # Latency as part of GG-Host's, at SMALL and at LARGE: section 5.2.
    "gn-host": (8.91, 3.79),
    "gg-direct": (0.6630, 0.1477),
    "gn-hawk": (0.7725, 0.1469),
}
MOST_FASTER = 27.69
"""GN-Host by GN-HAWK at most: abstract and section 1."""
FROM_DIRECT = 0.0065
"""GN-HAWK from GG-Direct: abstract and section 1."""

SLO = {"chatbot": (2.0, 0.2), "summarization": (15.0, 0.2)}
"""Seconds of TTFT and of TPOT: section 5.3."""

KNEES = {
    # Requests a second at 90 % attainment: section 5.3.3; None: not even at the lowest rate.
    ("chatbot", "gg-host"): 0.40,
    ("chatbot", "gn-host"): None,
    ("chatbot", "gg-direct"): 0.65,
    ("chatbot", "gn-hawk"): 0.65,
    ("summarization", "gg-host"): 0.38,
    ("summarization", "gn-host"): None,
    ("summarization", "gg-direct"): 0.65,
    ("summarization", "gn-hawk"): 0.60,
}

THROUGHPUT = {"chatbot": -0.0048, "summarization": -0.0788}
"""GN-HAWK's output throughput from GG-Direct's, at 90 % attainment: section 5.3.4."""

TABLE_8 = {
    # GN-HAWK by GG-Direct: section 5.4.
    ("chatbot", "power"): 1.26,
    ("summarization", "power"): 1.15,
    ("chatbot", "cost"): 1.72,
    ("summarization", "cost"): 1.61,
}

TABLE_9 = {
    # GN-HAWK by GGH-Direct: section 5.4.3.
    ("chatbot", "power"): 1.03,
    ("summarization", "power"): 1.03,
    ("chatbot", "cost"): 2.73,
    ("summarization", "cost"): 2.76,
    ("chatbot", "throughput"): 1 - 0.0653,
    ("summarization", "throughput"): 1 - 0.0650,
}

SOLVED_FROM = frozenset(
    # What calibration "paper" and its devices' files were solved from or chosen by, as those say: the three tables
    # above by their keys.  That these come out is no finding.
    {
        ("figure 9", "gn-host", SMALL),
        ("figure 9", "gn-host", LARGE),
        ("figure 9", "gg-direct", SMALL),
        ("figure 9", "gg-direct", LARGE),
        ("figure 9", "gn-hawk", SMALL),
        ("knee", "chatbot", "gg-host"),
        ("knee", "chatbot", "gg-direct"),
        ("knee", "summarization", "gg-direct"),
        ("table 9", "chatbot", "power"),
        ("table 9", "summarization", "power"),
        ("table 9", "chatbot", "cost"),
        ("table 9", "summarization", "cost"),
    }
)


@dataclass(frozen=True)
class Setting:
    """Something of the paper's set-up that the simulated part takes over."""

    name: str
    value: str
    where: str


SETTINGS = (
    Setting("prefill instance", "1, of 4 A100 (TP 4)", "sections 5.1.1, 5.1.2"),
    Setting("decode instance", "1, of 4 p150a, or of 4 A100 or 4 H100 (TP 4)", "sections 5.1.1, 5.4.3"),
    Setting("link", "200 Gb/s, InfiniBand", "section 5.1.1"),
    Setting("model", "Llama 3.1 70B", "section 5.1.2"),
    Setting("bytes of KV a token", "163,840 (10 MB are 64 tokens)", "section 5.2"),
    Setting("SLO, Chatbot", "TTFT 2000 ms, TPOT 200 ms", "section 5.3"),
    Setting("SLO, Summarization", "TTFT 15000 ms, TPOT 200 ms", "section 5.3"),
    Setting("attainment at the knee", "90 %", "section 5.3.3"),
)

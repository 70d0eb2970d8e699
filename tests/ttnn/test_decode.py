"""The documented decode loop against ttnn itself: agents bring a request, and its operations take what is given."""

from __future__ import annotations

from tests.ttnn import operations


def test_ttnn_takes_every_operation_of_the_decode_loop(on):
    said = on("p150", operations.decode_loop)
    assert "must match cache tensor dtype" in said.pop("other numbers")  # so a refusal is seen
    assert said == {"fill": "", "step": "", "attention": ""}

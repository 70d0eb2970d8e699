"""`hawk bench transfer --transport all`: what it moves, what it says, and a whole run over what needs no engine."""

import io
import json

import pytest
from rich.console import Console

from hawk.bench import engines
from hawk.bench.samples import Samples
from hawk.errors import InternalError, InvalidArgument
from hawk.transports import registry
from hawk.transports.base import Viability


def _result() -> engines.EnginesResult:
    def took(seconds: float) -> Samples:
        return Samples(1 << 20, [seconds])

    size = engines.SizeResult(1_000_000, 1 << 20, {"sockets": took(1.0), "memcpy": took(0.5)}, {})
    for what in (engines.ONE, engines.PIECES, engines.SHORT):
        size.hawk["tcp", what] = took(1.0)
        size.hawk["nixl", what] = took(1.0)
        size.alone["nixl", what] = took(6.0 if what == engines.SHORT else 0.9)
    size.joined["nixl"] = took(0.8)
    return engines.EnginesResult(1, {"verbs": "no device"}, [size])


def test_its_json_is_as_documented() -> None:
    told = json.loads(json.dumps(_result().to_dict()))
    assert told.keys() == {"machine", "runs", "sizes", "left_out", "correct"}
    (size,) = told["sizes"]
    assert size.keys() == {"asked", "bytes", "sockets", "memcpy", "ways"}
    assert size["ways"]["tcp"]["2 KB"].keys() == {"hawk"}
    short, long = size["ways"]["nixl"]["2 KB"], size["ways"]["nixl"]["512 KB"]
    assert short.keys() == {"hawk", "alone", "joined", "over_alone", "over_joined"}
    assert short["over_alone"] == pytest.approx(6.0)
    assert short["over_joined"] == pytest.approx(0.8)
    assert long.keys() == {"hawk", "alone", "over_alone"}


def test_its_table_has_every_way_and_what_was_left_out() -> None:
    out = io.StringIO()
    engines.render(_result(), Console(file=out, width=140))
    text = out.getvalue()
    assert all(
        word in text
        for word in ("sockets", "memcpy", "tcp", "nixl", "512 KB", "2 KB", "6.00", "0.90", "no device")
    )


def test_the_pieces_are_the_same_bytes() -> None:
    for rows in (engines._even(1 << 20, 512 << 10), engines._dealt(1 << 20)):
        assert rows.total == 1 << 20
        assert sorted(rows.local.tolist()) == sorted(set(rows.local.tolist()))
        assert int((rows.local + rows.nbytes).max()) == 1 << 20
        assert (rows.remote[1:] == rows.remote[:-1] + rows.nbytes[:-1]).all()


def test_a_run_over_one_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "survey", lambda: {"shm": Viability(True), "nixl": Viability(False, "not installed")}
    )
    result = engines.run((1_000_000,), runs=1)
    (size,) = result.sizes
    assert set(size.hawk) == {("shm", what) for what in (engines.ONE, engines.PIECES, engines.SHORT)}
    assert result.left_out == {"nixl": "not installed"}
    assert all(len(samples.seconds) == 1 for samples in size.hawk.values())


def test_wrong_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "survey", lambda: {"shm": Viability(True)})
    monkeypatch.setattr(engines.np, "copyto", lambda target, source: None)
    with pytest.raises(InternalError, match="memcpy"):
        engines.run((1_000_000,), runs=1)


@pytest.mark.parametrize(("sizes", "runs"), [((0,), 1), ((1,), 0)])
def test_nothing_to_measure(sizes: tuple[int, ...], runs: int) -> None:
    with pytest.raises(InvalidArgument):
        engines.run(sizes, runs)

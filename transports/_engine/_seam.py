"""What a foreign transfer engine has to be able to do, as this side uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.memory.region import I64

Handle = object
"""A transfer under way, as its engine knows it."""


class EngineFailed(ConnectionError):
    """The engine could not do what it was asked to; what it had under way may still be moving until it is closed."""


class Engine(ABC):
    """One instance of a transfer engine, used by one thread alone.  Addresses and lengths are bytes.

    Every method may raise `EngineFailed`; after that, and to end what is under way, there is `close`.
    """

    pushes: ClassVar[bool] = False
    """Whether its WRITEs can be used: posting does not wait, and `close` keeps a peer's from landing."""

    @property
    def gpus(self) -> str:
        """Why memory of GPUs cannot be registered, or nothing where it can."""
        return "this engine is used for memory of the host alone"

    @property
    @abstractmethod
    def description(self) -> bytes:
        """What a peer's `meet` needs, with everything that is registered now."""

    @abstractmethod
    def register(self, address: int, nbytes: int, gpu: int = -1) -> None:
        """Makes memory usable on either side of a transfer: a GPU's, by its number in this process, or the host's."""

    @abstractmethod
    def forget(self, address: int, nbytes: int) -> None:
        """Ends a registration; the memory may be gone already."""

    @abstractmethod
    def meet(self, description: bytes) -> object:
        """The peer that describes itself so."""

    @abstractmethod
    def part(self, peer: object) -> None:
        """Ends what there is between us and a peer; its transfers under way fail, soon."""

    @abstractmethod
    def post(
        self,
        peer: object,
        write: bool,
        local: I64,
        remote: I64,
        nbytes: I64,
        notice: bytes = b"",
        *,
        here: int = -1,
        there: int = -1,
    ) -> Handle:
        """Begins to READ (or WRITE) `nbytes[i]` bytes from `remote[i]` into `local[i]` (or the other way round).

        notice         told to the peer's `notices` behind the last byte, where the engine knows such things
        here, there    the GPU that all of `local`, or of `remote`, is memory of, as its own process numbers it
        """

    @abstractmethod
    def poll(self, handle: Handle) -> bool:
        """Whether a transfer is over, after some progress; then its handle must not be used again."""

    @abstractmethod
    def notices(self) -> list[bytes]:
        """Lets peers' transfers get on, and gives the notices that came with them since it was asked last."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything: afterwards it moves no byte, and lets no peer move one.  Safe to call twice."""


if TYPE_CHECKING:
    Opener = Callable[[], Engine]
    """Makes an engine; raises `EngineFailed`."""

"""`hawk-agent`: one process per node that owns its memories and moves caches; also usable embedded."""

from hawk.agent.core import Agent, run

__all__ = ["Agent", "run"]

"""The demonstration: two agents as processes, one cache from one to the other, every byte checked."""

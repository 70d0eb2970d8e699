"""Ways of moving bytes between agents.

`base` is the seam, `registry` finds transports by name and chooses one that both sides have, `tcp` and `shm`
are built in, `testing` holds the contract that every transport has to meet.  Nothing here knows a tensor, a
layout, a job or a kind of memory: only regions, segments and the errors.

Importing this package loads nothing but itself.
"""

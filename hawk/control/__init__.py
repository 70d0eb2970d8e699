"""How agents and their clients talk: keys, sockets, frames, links and the messages themselves.

Bytes of tensors never pass through here; transports move those.
"""

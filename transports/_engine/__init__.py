"""What transports on a foreign transfer engine share: `nixl`, `mooncake`, and others that bring an `Engine`.

An engine moves bytes between registered memory of two processes and knows nothing of grants, deadlines or endings.
The rest is here: a server that lets readers in and out of ranges (`_server`), a link whose one thread works an engine
of its own (`_client`), and the words between them (`_wire`).  What an engine has to be able to do is in `_seam`.
"""

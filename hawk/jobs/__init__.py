"""Jobs: who owns which bytes, from the first word of a transfer to its named end."""

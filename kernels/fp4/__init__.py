"""4-bit attention: number formats, the torch reference, and the backends that run it."""

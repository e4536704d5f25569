"""Which engines serve a request, and whether it is split."""

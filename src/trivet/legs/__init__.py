"""The legs of a request: what is sent to a prefill engine and to a decode engine, and what holds them together."""

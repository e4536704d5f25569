"""The render tier: a client's request to token ids, token ids back to what the client is answered.

vLLM does both. Its own API server runs in each gateway worker, with chat templates, validation, tool and reasoning
parsers, detokenizer, stop strings, usage and SSE untouched; only its engine core is taken out, and a
``contract.TokenEngine`` put in the place (``core``). ``contract`` is all that the rest of Trivet sees of it.
"""

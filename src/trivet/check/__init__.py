"""Whether KV moves between engines as it should: fast enough, over the transport that was meant, and correct."""

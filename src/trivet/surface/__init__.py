"""What clients of the gateway see besides vLLM's own endpoints. Knows nothing of connectors."""

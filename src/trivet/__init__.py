"""Trivet serves LLMs on vLLM split into three tiers: render (CPU), prefill and decode."""

__version__ = "0.1.0"

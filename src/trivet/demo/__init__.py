"""The demonstration: a real chat model out of a Python package, served split on this machine's CPU."""

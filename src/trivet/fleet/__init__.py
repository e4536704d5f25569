"""The fleet: engine processes, started, watched, started again, and gone when Trivet is gone."""

"""What several tests share: ``from helpers.engines import FakeEngine``."""

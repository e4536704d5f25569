"""The gateway: worker processes that speak OpenAI's API and run each request on the fleet's engines."""

"""Serving: pages, tiers, scheduling, the engine; HTTP in `serving.http`."""

"""Rollout: workflows, executor, staleness, trajectory store, and the client of inference servers."""

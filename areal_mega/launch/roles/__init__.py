"""What each role runs: one module per role, with ``main(context: WorkerContext) -> None``."""

"""What a run tells about itself: typed metrics in a file first, then console, MLflow and a report, which only read that file."""

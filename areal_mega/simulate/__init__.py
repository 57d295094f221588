"""What would a run do? Discrete events on a simulated clock, through the same dispatch and staleness code as a real run."""

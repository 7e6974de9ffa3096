"""What our tests and our users' tests need: a gloo worker pool, an fp64 oracle, a comparison."""

"""A batch as other projects have it, a file a project; what is heavy is imported there alone."""

"""Networks of other frameworks as functions in JAX, each in a module that imports its framework."""

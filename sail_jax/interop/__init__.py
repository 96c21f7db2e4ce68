"""Networks of other frameworks as JAX functions. Each module imports its framework itself."""

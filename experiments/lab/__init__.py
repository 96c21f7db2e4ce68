"""The framework that finds, configures, runs, stores, resumes and evaluates studies."""

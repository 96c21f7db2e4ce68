"""The framework that finds, configures, runs, stores, resumes, distributes and judges studies."""

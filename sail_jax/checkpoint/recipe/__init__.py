"""What recipes and tables of spaces say, read from YAML and checked."""

"""What several studies share: their data, starts, regions and drawings. It is not a study."""

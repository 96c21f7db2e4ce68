"""Code that several studies share: data, initial weights, regions and drawings. Not a study."""

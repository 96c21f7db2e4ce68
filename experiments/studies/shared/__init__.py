"""Code shared by several studies: data, initial weights, regions and drawings."""

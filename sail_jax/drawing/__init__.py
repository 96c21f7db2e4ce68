"""The style of figures and pages."""

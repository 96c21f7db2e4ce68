"""The look of figures and pages."""
